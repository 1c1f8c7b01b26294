"""The two sides of a comparison. Each side runs a number of steps and returns the seconds of one step."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tinker
from tinker import types
from tinsmith.local_server import running_server
from workloads import BETAS, EPS, LEARNING_RATE, PROMPT_TOKENS, RANK, ROWS, SAMPLED_TOKENS, TOKENS, token_rows

MODEL = "bench/tiny"
API_KEY = "tml-benchmark"

StepFutures = tuple[tinker.APIFuture[types.ForwardBackwardOutput], tinker.APIFuture[types.OptimStepResponse]]


class Bare:
    """A loop of `bare.py` in a separate process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds_for_one_of(self, count: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the reference process ended with status {self._process.wait()}")
        return float(answer) / count


@contextmanager
def bare(loop: str, model: Path) -> Iterator[Bare]:
    # PEFT still calls a function that transformers has deprecated.
    command = [
        sys.executable,
        "-W",
        "ignore::FutureWarning",
        str(Path(__file__).with_name("bare.py")),
        loop,
        str(model),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Bare(process)


@contextmanager
def training_client(model: Path, scratch: Path) -> Iterator[tinker.TrainingClient]:
    """Start a server and its worker as processes, and yield the unmodified SDK's training client."""
    arguments = [f"--data={scratch / 'data'}", f"--model={MODEL}={model}", "--log-level=warning"]
    with running_server(arguments, API_KEY, scratch) as base_url:
        service = tinker.ServiceClient(base_url=base_url, api_key=API_KEY)
        yield service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
        service.close("success").result()


class ServedSteps:
    """Training steps."""

    def __init__(self, client: tinker.TrainingClient, vocab_size: int) -> None:
        self._client = client
        self._data = [step_datum(row) for row in token_rows(ROWS, TOKENS + 1, vocab_size)]
        self._adam = types.AdamParams(learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS)

    def seconds_for_one_of(self, count: int) -> float:
        """Submit all steps before the first wait, as the SDK's documentation recommends.

        The time is measured from the first step's result to the last step's result, so that the pipeline is full. A
        training run fills the pipeline only once.
        """
        submitted = [self._submit() for _ in range(count + 1)]
        _finish(submitted[0])
        started = time.perf_counter()
        for futures in submitted[1:]:
            _finish(futures)
        return (time.perf_counter() - started) / count

    def _submit(self) -> StepFutures:
        return self._client.forward_backward(self._data, "cross_entropy"), self._client.optim_step(self._adam)


def _finish(futures: StepFutures) -> None:
    for future in futures:
        future.result()


def step_datum(row: Sequence[int]) -> types.Datum:
    weights = [1.0] * (len(row) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(row[:-1])),
        loss_fn_inputs={"target_tokens": list(row[1:]), "weights": weights},  # type: ignore[dict-item]
    )


class ServedSamples:
    """Samples from a client's weights, with several samples in each request.

    All requests are submitted before the first wait.
    """

    def __init__(self, client: tinker.SamplingClient, vocab_size: int, samples_per_request: int = 1) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._samples_per_request = samples_per_request
        # An empty list: no stop sequence ends a sample early.
        self._params = types.SamplingParams(max_tokens=SAMPLED_TOKENS, temperature=1.0, stop=[])
        self._seeds = itertools.count(1)

    def seconds_for_one_of(self, count: int) -> float:
        """Sample new prompts in each block.

        With the prompts of an earlier block, the server would answer faster because of cached prefixes.
        """
        each = self._samples_per_request
        rows = token_rows(count // each, PROMPT_TOKENS, self._vocab_size, seed=next(self._seeds))
        prompts = [types.ModelInput.from_ints(list(row)) for row in rows]
        started = time.perf_counter()
        for future in [self._client.sample(prompt, each, self._params) for prompt in prompts]:
            sequences = future.result().sequences
            assert [len(sequence.tokens) for sequence in sequences] == [SAMPLED_TOKENS] * each
        return (time.perf_counter() - started) / count
