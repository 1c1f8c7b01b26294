"""Adapters of mixtures leave for PEFT and for Tinker's cookbook, and come back, with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from support.engine.contract import forward
from support.engine.datums import sft_datum
from support.zoo.families import family_directory
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.engines.base import AdapterState, AnnouncedAdapter, Engine, LoraSpec
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.torch_model.loading import load_torch_model
from transformers import AutoModelForCausalLM

RANK = 4
ANNOUNCED = AnnouncedAdapter(RANK, seed=0)
DATUM = sft_datum(12, seed=0)

FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3")
NOT_SERVED = {"deepseek_v3"}
"""The cookbook makes no adapter for servers of these, which have none either."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    # Said of parameters too, for which PEFT does take them.
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match:RuntimeWarning"),
]


@dataclass(frozen=True)
class Left:
    """A family's tiny model, and an adapter with parts everywhere, as its checkpoint's files."""

    family: str
    base: Path
    engine: Engine
    state: AdapterState
    checkpoint: Path
    logprobs: np.ndarray


@pytest.fixture(scope="module", params=FAMILIES)
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Left:
    folder: Path = tmp_path_factory.mktemp(request.param)
    base = family_directory(request.param)
    engine = build_peft_engine(load_torch_model(str(base)))
    state = _with_random_weights(engine)
    written = CheckpointRoot(folder.as_uri()).write("run", 1, 1, "sampler", state, engine.base_model(), "weights")
    return Left(request.param, base, engine, state, folder / written.directory, _logprobs_of_engine(engine))


def _with_random_weights(engine: Engine) -> AdapterState:
    engine.create_adapter("a", LoraSpec(RANK, 8.0, 1))
    fresh, draw = engine.state("a"), np.random.default_rng(0)
    tensors = {name: draw.normal(0, 0.1, one.shape).astype(np.float32) for name, one in fresh.tensors.items()}
    engine.load_state("a", AdapterState(fresh.lora, 0, tensors), with_optimizer=False)
    return engine.state("a")


def _logprobs_of_engine(engine: Engine) -> np.ndarray:
    return np.asarray(forward(engine, [DATUM]).outputs[0]["logprobs"])


def _logprobs_of_model(model: torch.nn.Module) -> np.ndarray:
    targets = torch.from_numpy(DATUM.loss_inputs["target_tokens"])
    with torch.no_grad():
        scores = torch.log_softmax(model(torch.from_numpy(DATUM.tokens)[None].long()).logits[0].float(), -1)
    return scores.gather(1, targets[:, None])[:, 0].numpy()


def _load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _equals(left: Left, folder: Path) -> bool:
    """Return true if the exported files, imported again, are the same adapter."""
    files = (folder / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    came = left.engine.read_adapter(*(file.read_bytes() for file in files), ANNOUNCED)
    assert came.tensors.keys() == left.state.tensors.keys()
    return all(np.array_equal(came.tensors[name], tensor) for name, tensor in left.state.tensors.items())


def test_plain_peft_says_the_same_and_its_files_come_back_as_they_were(left: Left, tmp_path: Path) -> None:
    left.engine.export(left.state, tmp_path, "peft")
    adapted = _logprobs_of_model(PeftModel.from_pretrained(_load(left.base), tmp_path))
    np.testing.assert_allclose(adapted, left.logprobs, atol=1e-4)
    assert np.abs(adapted - _logprobs_of_model(_load(left.base))).max() > 1e-2
    assert _equals(left, tmp_path)


def test_the_cookbook_merges_a_checkpoint_into_a_model_that_says_the_same(left: Left, tmp_path: Path) -> None:
    build_hf_model(base_model=str(left.base), adapter_path=str(left.checkpoint), output_path=str(tmp_path / "merged"))
    np.testing.assert_allclose(_logprobs_of_model(_load(tmp_path / "merged")), left.logprobs, atol=1e-4)
    assert _equals(left, left.checkpoint)


def test_the_cookbook_makes_an_adapter_for_servers_that_comes_back_as_it_was(left: Left, tmp_path: Path) -> None:
    if left.family in NOT_SERVED:
        return
    served = tmp_path / "served"
    build_lora_adapter(base_model=str(left.base), adapter_path=str(left.checkpoint), output_path=str(served))
    assert _equals(left, served)
