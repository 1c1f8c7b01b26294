"""Both sides of a comparison behind one verb: run so many steps, say how many seconds each took."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tinker
from tinker import types
from tinsmith.local_server import running_server
from workloads import BETAS, EPS, LEARNING_RATE, RANK, Workload, token_rows

MODEL = "bench/tiny"
API_KEY = "tml-benchmark"

StepFutures = tuple[tinker.APIFuture[types.ForwardBackwardOutput], tinker.APIFuture[types.OptimStepResponse]]


class BareLoop:
    """The loop of `bare_peft.py`, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def seconds_per_step(self, steps: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline()) / steps


@contextmanager
def bare_loop(directory: Path) -> Iterator[BareLoop]:
    command = [sys.executable, str(Path(__file__).with_name("bare_peft.py")), str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield BareLoop(process)


class ServedLoop:
    """The SDK, a server and its worker."""

    def __init__(self, client: tinker.TrainingClient, vocab_size: int) -> None:
        self._client = client
        self._data = [_datum(row) for row in token_rows(vocab_size)]
        self._adam = types.AdamParams(learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS)

    def seconds_per_step(self, steps: int) -> float:
        """Submits everything, then waits, as the SDK's documentation says to.

        Timed from the result of one step to the result of the last, so that the pipeline is full:
        a training run fills it once.
        """
        submitted = [self._submit() for _ in range(steps + 1)]
        _finish(submitted[0])
        started = time.perf_counter()
        for futures in submitted[1:]:
            _finish(futures)
        return (time.perf_counter() - started) / steps

    def _submit(self) -> StepFutures:
        return self._client.forward_backward(self._data, "cross_entropy"), self._client.optim_step(self._adam)


def _finish(futures: StepFutures) -> None:
    for future in futures:
        future.result()


def _datum(row: Sequence[int]) -> types.Datum:
    weights = [1.0] * (len(row) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(row[:-1])),
        loss_fn_inputs={"target_tokens": list(row[1:]), "weights": weights},  # type: ignore[dict-item]
    )


@contextmanager
def served_loop(directory: Path, workload: Workload, scratch: Path) -> Iterator[ServedLoop]:
    arguments = [f"--data={scratch / 'data'}", f"--model={MODEL}={directory}", "--log-level=warning"]
    with running_server(arguments, API_KEY, scratch) as base_url:
        service = tinker.ServiceClient(base_url=base_url, api_key=API_KEY)
        client = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
        yield ServedLoop(client, workload.shape.vocab_size)
        service.close("success").result()
