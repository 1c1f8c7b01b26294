"""NeMo RL's Megatron worker, the real one, trains what the PEFT engine trains. One, without Ray."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.contract import state_bits
from support.nemo_rl.engines import engine_over
from support.nemo_rl.peft_comparison import Apart, trained_apart
from support.nemo_rl.real_workers import RealWorker
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.model.architecture import read_architecture
from tinsmith_trainer.engines.megatron.model.weights import Checkpoint, Loader, Part
from tinsmith_trainer.engines.nemo_rl.conversion import converted_model
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.tiny_model import Family
from torch import Tensor
from transformers import AutoConfig

pytestmark = [pytest.mark.nemo_rl, pytest.mark.timeout(1800)]

MAX_RANK = 8
SETTINGS = MegatronSettings(max_rank=MAX_RANK, token_budget=64)
AS_SAVED = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
"""Megatron saves the norms of its own layers under the names of TransformerEngine's, which have them inside."""
FLOAT32 = Apart(logprob=1e-5, norm=1e-4, weight=1e-5)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3-moe"])
def test_a_model_is_converted_to_megatrons_format_bit_by_bit(family: Family, note: Any) -> None:
    model = tiny_model(family)
    folder = converted_model(model.directory, model.info.revision, Path(sys.executable))
    assert "use_cpu_initialization: false" in (folder / "run_config.yaml").read_text()
    found, wanted = _converted(folder), _expected(model.directory)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor.to(found[name].dtype)), name
    note(f"conversion of a tiny {family} by Megatron-Bridge", "nothing", "nothing")


def test_a_worker_trains_two_adapters_as_the_peft_engine_does_and_takes_a_state_back(note: Any) -> None:
    model = tiny_model("llama3")
    engine = engine_over(RealWorker(model, SETTINGS), model, SETTINGS)
    apart = trained_apart(engine, build_peft_engine(model, PeftEngineSettings(max_rank=MAX_RANK)))
    assert apart.within(FLOAT32), apart
    state = engine.state("a")
    engine.drop("a")
    engine.load_state("a", state, True)
    assert state_bits(engine.state("a")) == state_bits(state)
    what = "one worker without Ray, Llama, float32; an adapter that is read back has the same bits"
    note(what, str(FLOAT32), str(apart))


def _converted(folder: Path) -> dict[str, Tensor]:
    """Return a checkpoint of Megatron's, whose layers are stacked, without names of what is no tensor."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(tensors, storage_reader=FileSystemReader(folder), no_dist=True)
    return tensors


def _expected(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of our own reader of transformers checkpoints.

    Layers are stacked as above, and a layer's experts once more.
    """
    architecture = read_architecture(directory, AutoConfig.from_pretrained(directory))
    with Checkpoint(directory) as checkpoint:
        makers = Loader(checkpoint, architecture, Part(0, 1))._makers(range(architecture.layers))
        made = {name: make() for name, make in makers.items() if architecture.query_key_norms or not _of_heads(name)}
    stacked: dict[str, list[Tensor]] = {}
    for name, tensor in made.items():
        stacked.setdefault(_as_saved(name), []).append(tensor)
    return {name: _stacked(name, parts, architecture.layers) for name, parts in stacked.items()}


def _stacked(name: str, parts: list[Tensor], layers: int) -> Tensor:
    if ".layers." not in name:
        return parts[0]
    together = torch.stack(parts)
    return together.unflatten(0, (layers, -1)) if ".experts." in name else together


def _of_heads(name: str) -> bool:
    """Return true for a norm of queries or keys."""
    return ".q_layernorm." in name or ".k_layernorm." in name


def _as_saved(name: str) -> str:
    """Return the name without the numbers of layer and expert."""
    saved = re.sub(r"\.layers\.\d+\.", ".layers.", name)
    saved = re.sub(r"\.local_experts\.\d+\.", ".experts.", saved)
    for own, fused in AS_SAVED.items():
        saved = saved.replace(own, fused)
    return saved
