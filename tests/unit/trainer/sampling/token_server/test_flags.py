"""The flags of a sampler that runs a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_trainer.options import UsageError, parse_options

SAMPLER = ["--model", "m", "--checkpoint-root", "file:///c", "--socket", "s", "--role", "sampler"]
WORKER = ["--model", "m", "--checkpoint-root", "file:///c", "--socket", "s", "--volume", "v"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_sampler_may_run_a_server(engine: str) -> None:
    flags = [
        "--engine",
        engine,
        "--gpus",
        "4",
        "--scratch",
        "/scratch",
        "--server-argument=--a",
        "--server-argument=b c",
    ]
    options = parse_options([*SAMPLER, *flags])
    assert (options.engine, options.gpus, options.scratch) == (engine, 4, Path("/scratch"))
    assert options.server_argument == ["--a", "b c"]


def test_no_sampler_gets_arguments_of_another() -> None:
    parse_options([*SAMPLER, "--engine", "vllm", "--server-argument=--a"])
    assert parse_options([*SAMPLER, "--engine", "vllm"]).server_argument == []


@pytest.mark.parametrize("word", ["--logprobs-mode=processed_logprobs", "--logprobs_mode", "--sampling-defaults"])
def test_flags_that_would_change_the_meaning_of_samples_are_refused(word: str) -> None:
    """Otherwise every logprob would silently change."""
    with pytest.raises(UsageError, match=f"{word}: .* would change what samples and their logprobs mean; leave it out"):
        parse_options([*SAMPLER, "--engine", "vllm", "--server-argument=--a", f"--server-argument={word}"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param([*WORKER, "--engine", "vllm"], "a worker knows no engine 'vllm'", id="a worker"),
        pytest.param([*SAMPLER, "--engine", "vllm", "--gpus", "0"], "--gpus must be positive", id="no GPU"),
        pytest.param([*SAMPLER, "--gpus", "2"], "are for vllm and sglang, and not for builtin", id="GPUs of builtin"),
        pytest.param([*SAMPLER, "--server-argument=x"], "and not for builtin", id="words for builtin"),
        pytest.param([*WORKER, "--scratch", "/s"], "and not for peft", id="a worker's scratch"),
        pytest.param([*SAMPLER, "--server-environment", "/e"], "and not for builtin", id="an environment for builtin"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_options(arguments)
