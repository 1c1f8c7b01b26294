from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from support.engine.datums import sft_datum
from support.sampler.jobs import job, prompt_of, submit
from support.tiny_models import tiny_directory
from tinsmith_trainer.engines.base import LoraSpec, LossSpec, Work
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.options import WorkerOptions, parse_options
from tinsmith_trainer.worker.engine_factories import build_colocated, build_sampler, load_base_model


def options(*flags: str) -> WorkerOptions:
    needed = ["--model", str(tiny_directory()), "--volume", "v", "--socket", "s", "--checkpoint-root", "file:///c"]
    return parse_options([*needed, *flags])


@pytest.mark.slow("imports PyTorch in a process of its own")
def test_the_factories_import_common_modules_while_the_garbage_collector_is_paused() -> None:
    """The collector pauses during imports, not during loading, whose garbage must be freed."""
    program = """
import sys
import tinsmith_trainer.worker.engine_factories
print(sys.modules.keys() >= {"torch", "transformers.modeling_utils"})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_lower_length_is_the_limit_of_engine_and_sampler() -> None:
    engine, sampler = build_colocated(options("--max-sequence-length", "100"))
    assert sampler is not None
    sampler.close()
    assert engine.base_model().max_sequence_length == 100


def test_the_dtype_is_that_of_the_weights_that_engine_and_sampler_share() -> None:
    model = load_base_model(options("--device", "cpu", "--dtype", "bfloat16"))
    assert model.model.dtype == torch.bfloat16
    assert load_base_model(options("--device", "cpu")).model.dtype == torch.float32


@pytest.mark.parametrize(("flags", "microbatches"), [([], 1), (["--token-budget", "100"], 3)])
def test_a_token_budget_limits_the_tokens_of_one_computation(flags: list[str], microbatches: int) -> None:
    engine, _ = build_colocated(options("--no-sampling", *flags))
    engine.create_adapter("a", LoraSpec(rank=4, alpha=32.0, seed=1))
    call = engine.start(Work("a", [sft_datum(90, seed) for seed in range(3)], LossSpec("cross_entropy")))
    computed = 0
    while call.next_tokens:
        engine.advance([call])
        computed += 1
    assert computed == microbatches


def test_memory_for_keys_that_holds_not_the_shortest_row_ends_the_start() -> None:
    with pytest.raises(ServerError, match="--kv-cache-bytes allows"):
        build_colocated(options("--kv-cache-bytes", "1000"))


def test_a_sampler_of_its_own_keeps_to_a_lower_length_too() -> None:
    needed = ["--model", str(tiny_directory()), "--socket", "s", "--checkpoint-root", "file:///c"]
    base, sampler = build_sampler(parse_options([*needed, "--role", "sampler", "--max-sequence-length", "100"]))
    assert base.max_sequence_length == 100
    try:
        with_no_room = submit(sampler, job(prompt_of(100)))
        assert "leaves no room" in str(with_no_room.get().error)
    finally:
        sampler.close()
