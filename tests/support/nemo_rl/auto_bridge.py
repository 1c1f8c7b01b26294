"""Megatron-Bridge's import of a Hugging Face model, as far as one process without a GPU asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save

_contexts: list[str] = []


@contextmanager
def temporary_distributed_context(backend: str) -> Iterator[None]:
    _contexts.append(backend)
    try:
        yield
    finally:
        _contexts.remove(backend)


@dataclass
class Provider:
    """A model's configuration, which also builds it."""

    directory: str
    load_weights: bool
    use_cpu_initialization: bool = False
    gradient_accumulation_fusion: bool = True
    finalized: bool = False

    def finalize(self) -> None:
        self.finalized = True

    def provide_distributed_model(self, *, wrap_with_ddp: bool, use_cpu_initialization: bool) -> list[Model]:
        assert _contexts == ["gloo"], "it would start NCCL"
        assert self.finalized
        assert self.load_weights
        assert not wrap_with_ddp, "there is no ddp_config"
        assert not self.gradient_accumulation_fusion, "there are no kernels for it"
        assert use_cpu_initialization, "it would allocate on a GPU"
        self.use_cpu_initialization = True
        return [Model(self)]


@dataclass
class Model:
    config: Provider


class AutoBridge:
    """Its checkpoint holds the tensors under Hugging Face's names: the mapping is Megatron-Bridge's own business."""

    def __init__(self, directory: str) -> None:
        json.loads(Path(directory, "config.json").read_text())
        self._directory = directory

    @classmethod
    def from_hf_pretrained(cls, directory: str, *, trust_remote_code: bool) -> AutoBridge:
        assert not trust_remote_code
        assert not _contexts, "the Hugging Face model comes before the distributed state"
        return cls(directory)

    def to_megatron_provider(self, *, load_weights: bool) -> Provider:
        return Provider(self._directory, load_weights)

    def save_megatron_model(self, model: list[Model], path: str) -> None:
        assert _contexts == ["gloo"]
        torch.cuda.get_rng_state()
        torch.cuda.synchronize()
        torch.tensor([0], device=torch.cuda.current_device())
        [chunk] = model
        iteration = Path(path, "iter_0000000")
        iteration.mkdir()
        for shard in Path(self._directory).glob("*.safetensors"):
            (iteration / "__0_0.distcp").write_bytes(save(load_file(shard)))
        (iteration / "run_config.yaml").write_text(json.dumps(asdict(chunk.config)))
        Path(path, "latest_checkpointed_iteration.txt").write_text("0")
