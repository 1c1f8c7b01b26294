"""The properties of a model on Megatron's layers for which one rank is enough."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nemo_rl.gloo import GlooRanks
from support.tiny_models import SMALL, TIED, tiny_directory, tiny_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.errors import ModelDirectoryInvalid
from tinsmith_trainer.torch_model.loading import load_torch_model
from torch import Tensor

TOKENS = torch.randint(SMALL.vocab_size, (2, 40), generator=torch.Generator().manual_seed(3))
LLAMA_3_ROTARY = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def rank() -> Iterator[GlooRanks]:
    with GlooRanks(1) as ranks:
        ranks.run(_join)
        yield ranks


def _join() -> None:
    from tinsmith_trainer.engines.megatron.model.gpt_model import initialise_parallel

    initialise_parallel(Parallelism(), 0)


def _logits(directory: Path, dtype: torch.dtype) -> tuple[Tensor, set[torch.dtype], set[torch.dtype]]:
    """Return the logits, and the types of frozen and of trained parameters."""
    from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
    from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model

    model = build_megatron_model(directory, Parallelism(), max_rank=8, dtype=dtype)
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    # Some virtual machines advertise AMX and trap on it; oneDNN would use it for bfloat16.
    with torch.backends.mkldnn.flags(enabled=False), cpu_megatron(), torch.no_grad():
        logits = model.chunk(TOKENS, positions, None)
    trained = {id(tensor.parameter) for tensor in model.lora.tensors}
    parameters = list(model.chunk.parameters())
    assert {id(parameter) for parameter in parameters if parameter.requires_grad} == trained
    frozen = {parameter.dtype for parameter in parameters if id(parameter) not in trained}
    return logits, frozen, {tensor.parameter.dtype for tensor in model.lora.tensors}


def test_rotary_positions_stretched_as_llama_3_does_are_those_of_transformers(rank: GlooRanks, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_directory("llama3"), tmp_path / "model")
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rope_parameters": LLAMA_3_ROTARY}))
    with torch.no_grad():
        wanted = load_torch_model(str(directory)).model(TOKENS).logits
        plain = tiny_model("llama3").model(TOKENS).logits
    [(logits, _, _)] = rank.run(_logits, directory, torch.float32)
    assert not torch.allclose(wanted, plain, atol=1e-3)
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)


def _vocabulary_matrices(directory: Path) -> int:
    """Return the number of vocabulary matrices in memory."""
    from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model

    chunk: Any = build_megatron_model(directory, Parallelism(), max_rank=8).chunk
    return len({chunk.embedding.word_embeddings.weight.data_ptr(), chunk.output_layer.weight.data_ptr()})


def test_tied_embeddings_are_held_once_where_a_stage_has_both(rank: GlooRanks) -> None:
    assert rank.run(_vocabulary_matrices, tiny_directory("qwen3", TIED)) == [1]
    assert rank.run(_vocabulary_matrices, tiny_directory("qwen3", SMALL)) == [2]


def test_a_base_in_bfloat16_has_its_adapters_in_float32(rank: GlooRanks) -> None:
    [(logits, frozen, trained)] = rank.run(_logits, tiny_directory("qwen3"), torch.bfloat16)
    with torch.no_grad():
        wanted = tiny_model("qwen3").model(TOKENS).logits
    assert (frozen, trained) == ({torch.bfloat16}, {torch.float32})
    torch.testing.assert_close(logits.float(), wanted, atol=2e-2, rtol=2e-2)


def test_a_directory_without_a_whole_model_is_refused_as_the_peft_engine_refuses_it(
    rank: GlooRanks, tmp_path: Path
) -> None:
    with pytest.raises(ModelDirectoryInvalid, match=r"config\.json is missing"):
        rank.run(_logits, tmp_path, torch.float32)


def test_a_process_group_of_another_size_than_the_engines_is_refused(rank: GlooRanks) -> None:
    with pytest.raises(RuntimeError, match="rank 0 of 1 in the process group, but rank 0 of 2"):
        rank.run(_join_two)


def _join_two() -> None:
    from tinsmith_trainer.engines.megatron.model.gpt_model import initialise_parallel

    initialise_parallel(Parallelism(world_size=2), 0)
