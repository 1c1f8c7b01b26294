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
from support.tiny_models import tiny_directory
from tinker_cookbook.weights import build_hf_model, build_lora_adapter
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.engines.base import AdapterState, AnnouncedAdapter, Engine, LoraSpec
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.torch_model.loading import load_tokenizer, load_torch_model
from transformers import AutoConfig, AutoModelForCausalLM

RANK = 4
ANNOUNCED = AnnouncedAdapter(RANK, seed=0)
DATUM = sft_datum(12, seed=0)

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "gpt_oss": {},
    "glm4_moe": {},
    "deepseek_v3": {"num_key_value_heads": 4},
}
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
    base = _make_model(request.param, folder / "base")
    engine = build_peft_engine(load_torch_model(str(base)))
    state = _with_random_weights(engine)
    written = CheckpointRoot(folder.as_uri()).write("run", 1, 1, "sampler", state, engine.base_model(), "weights")
    return Left(request.param, base, engine, state, folder / written.directory, _logprobs_of_engine(engine))


def _make_model(family: str, directory: Path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})).float()
    model.save_pretrained(directory)
    load_tokenizer(tiny_directory()).save_pretrained(directory)
    return directory


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
    """Whether what lies there comes in as the adapter that left."""
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
