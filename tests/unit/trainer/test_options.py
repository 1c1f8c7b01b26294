from __future__ import annotations

import pytest
from tinsmith_trainer.options import OFFERED_SAVES_BYTES, UsageError, parse_options

MODEL = ["--model", "m", "--checkpoint-root", "file:///c"]
WORKER = [*MODEL, "--volume", "v"]
SAMPLER = [*MODEL, "--socket", "s", "--role", "sampler"]
PORT = ["--listen", "0.0.0.0:7443", "--tls-directory", "/tls"]


def test_a_sampler_with_ranks_is_placed_like_a_sampler_with_peft() -> None:
    options = parse_options([*WORKER, "--socket", "s", "--engine", "nemo-rl", "--dtype", "bfloat16"])
    assert (options.device, options.dtype) == ("auto", "bfloat16")


@pytest.mark.parametrize("engine", ["builtin", "vllm", "sglang"])
def test_every_sampler_gets_the_type_of_its_weights(engine: str) -> None:
    assert parse_options([*SAMPLER, "--engine", engine, "--dtype", "float32"]).dtype == "float32"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(WORKER, "one of the arguments --socket --listen is required", id="no-door"),
        pytest.param([*WORKER, *PORT, "--socket", "s"], "not allowed with argument", id="two-doors"),
        pytest.param([*WORKER, *PORT[:2]], "belong together", id="a-port-in-plain-text"),
        pytest.param([*WORKER, *PORT[2:], "--socket", "s"], "belong together", id="certificates-for-nothing"),
        pytest.param([*WORKER, "--listen", "7443", *PORT[2:]], "'7443' is not HOST:PORT", id="no-host"),
        pytest.param([*WORKER, "--listen", "a:70000", *PORT[2:]], "is not HOST:PORT", id="no-such-port"),
        pytest.param([*MODEL, "--socket", "s"], "a worker needs --volume", id="no-volume"),
        pytest.param(
            [*MODEL, "--socket", "s", "--role", "sampler", "--no-sampling"], "would do nothing", id="idle-sampler"
        ),
        pytest.param(
            [*MODEL, "--socket", "s", "--role", "sampler", "--image", "i"], "a sampler has none", id="sampler-image"
        ),
        pytest.param([*WORKER, "--socket", "s", "--max-sequence-length", "0"], "must be positive", id="no-length"),
        pytest.param([*WORKER, "--socket", "s", "--adapter-slots", "0"], "must be positive", id="no-slots"),
        pytest.param([*WORKER, "--socket", "s", "--token-budget", "0"], "must be positive", id="no-tokens"),
        pytest.param([*SAMPLER, "--lora-products", "tf32"], "is for --engine peft", id="untrained-products"),
        pytest.param([*SAMPLER, "--loss-kernel", "torch"], "is for --engine peft", id="untrained-kernel"),
        pytest.param([*SAMPLER, "--recompute", "layers"], "is for --engine peft and nemo-rl", id="untrained-layers"),
        pytest.param(
            [*WORKER, "--socket", "s", "--recompute", "mlp"], "peft, which knows auto, none, layers", id="pefts-mlp"
        ),
        pytest.param([*WORKER, "--socket", "s", "--saves-socket", "d"], "its own sampler has what", id="own-sampler"),
        pytest.param([*SAMPLER, "--offered-saves-bytes", "9"], "a sampler makes none", id="unsaved-saves"),
        pytest.param([*WORKER, "--socket", "s", "--offered-saves-bytes", "-1"], "must not be", id="fewer-than-none"),
        pytest.param([*SAMPLER, "--token-budget", "9"], "a sampler does none", id="untrained-tokens"),
        pytest.param([*WORKER, "--socket", "s", "--kv-cache-bytes", "0"], "must be positive", id="no-memory"),
        pytest.param(
            [*WORKER, "--socket", "s", "--no-sampling", "--kv-cache-bytes", "9"],
            "there is none",
            id="memory-without-a-sampler",
        ),
        pytest.param([*SAMPLER, "--engine", "vllm", "--kv-cache-bytes", "9"], "there is none", id="vllms-memory"),
        pytest.param(
            [*WORKER, "--socket", "s", "--model-places", "9"], "give --adapter-slots or more", id="few-places"
        ),
        pytest.param([*WORKER, "--socket", "s", "--max-rank", "0"], "must be positive", id="no-rank"),
        pytest.param(
            [*WORKER, "--socket", "s", "--attempts-per-operation", "0"],
            "--attempts-per-operation must be positive",
            id="no-attempts",
        ),
        pytest.param([*WORKER, "--socket", "s", "--engine", "vllm"], "knows no engine 'vllm': peft", id="no-engine"),
        pytest.param([*WORKER, "--socket", "s", "--device", "gpu"], "invalid choice: 'gpu'", id="no-device"),
        pytest.param([*SAMPLER, "--engine", "vllm", "--device", "cuda"], "and not for vllm", id="vllm-places-itself"),
        pytest.param(
            [*WORKER, "--socket", "s", "--engine", "nemo-rl", "--no-sampling", "--device", "cpu"],
            "and not for nemo-rl",
            id="ranks-place-themselves",
        ),
        pytest.param(
            [*WORKER, "--socket", "s", "--engine", "nemo-rl", "--quantization", "4bit"],
            "--quantization is for peft and the built-in sampler, and not for nemo-rl",
            id="quantized-ranks",
        ),
        pytest.param([*WORKER, "--socket", "s", "--quantization", "3bit"], "invalid choice: '3bit'", id="odd-bits"),
        pytest.param([*WORKER, "--socket", "s", "--engine", "module:"], "knows no engine", id="no-factory"),
        pytest.param([*SAMPLER, "--engine", "peft"], "a sampler knows no engine 'peft': builtin", id="no-sampler"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_with_a_message(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(flags)


def test_only_a_worker_on_a_network_keeps_saves_for_samplers_by_default() -> None:
    assert parse_options([*WORKER, *PORT]).offered_saves_bytes == OFFERED_SAVES_BYTES
    assert parse_options([*WORKER, "--socket", "s"]).offered_saves_bytes == 0
    assert parse_options([*WORKER, "--socket", "s", "--offered-saves-bytes", "9"]).offered_saves_bytes == 9
    assert parse_options([*WORKER, *PORT, "--offered-saves-bytes", "0"]).offered_saves_bytes == 0
