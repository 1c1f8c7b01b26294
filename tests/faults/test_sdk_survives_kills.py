"""`kill -9` of the worker, of the server, of both, in the middle of a pipelined SDK program.

The program does not notice; every acknowledged operation runs exactly once; the final adapter weights
and optimizer state equal those of an undisturbed run bit for bit. Real SDK, real engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.sdk import adam, exact_logprobs, next_token_datum, service_client
from support.servers import ServedInstallation
from tinsmith_trainer.tiny_model import make_tiny_model

MODEL = "Qwen/Qwen3-8B"
ROUNDS = 12
TOKENS = [[5, 9, 2, 14, 7, 11, 3, 8], [4, 4, 8, 15, 16, 23], [7, 1, 6, 8, 0, 3, 3]]


@dataclass(frozen=True)
class Ending:
    """Everything that a run leaves behind: each answer, and each tensor of its last checkpoint."""

    logprobs: list[list[list[float]]]
    grad_norms: list[float]
    optimizer_steps: list[float]
    tensors: dict[str, bytes]


def run_program(server: ServedInstallation, disturb: Callable[[], None]) -> Ending:
    """Submits all rounds without waiting, disturbs once a third of them is answered, waits for the rest."""
    with service_client(server) as client:
        model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
        rounds = []
        for index in range(ROUNDS):
            data = [next_token_datum(TOKENS[(index + offset) % 3]) for offset in range(3)]
            rounds.append((model.forward_backward(data, "cross_entropy"), model.optim_step(adam(3e-3))))
        rounds[ROUNDS // 3][1].result()
        disturb()
        forwards = [forward.result() for forward, _ in rounds]
        steps = [step.result().metrics or {} for _, step in rounds]
        path = model.save_state("final").result().path
    run = path.split("/")[2].replace(":", ".")
    [folder] = (server.data / "checkpoints" / "weights" / run).iterdir()
    return Ending(
        logprobs=[exact_logprobs(forward) for forward in forwards],
        grad_norms=[step["grad_norm"] for step in steps],
        optimizer_steps=[step["step"] for step in steps],
        tensors={
            name: tensor.tobytes()
            for file in ("adapter_model.safetensors", "optimizer.safetensors")
            for name, tensor in load_file(folder / file).items()
        },
    )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(tmp_path: Path, tiny_model: Path) -> Iterator[ServedInstallation]:
    installation = ServedInstallation(tmp_path / "data", {MODEL: tiny_model}).start()
    yield installation
    installation.stop()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Ending:
    installation = ServedInstallation(tmp_path_factory.mktemp("undisturbed"), {MODEL: tiny_model}).start()
    ending = run_program(installation, lambda: None)
    installation.stop()
    return ending


def kill_worker(server: ServedInstallation) -> None:
    server.kill_workers()


def kill_server(server: ServedInstallation) -> None:
    """Its worker sees the pipe close and ends too; the new server starts a new one on the same journal."""
    server.kill()
    server.start()


def kill_both(server: ServedInstallation) -> None:
    server.kill_workers()
    kill_server(server)


def stop_cleanly(server: ServedInstallation) -> None:
    assert server.stop() == 0
    server.start()


def kill_the_worker_three_times(server: ServedInstallation) -> None:
    """The later two while it is starting or replaying."""
    kill_worker(server)
    for delay_seconds in (2.0, 6.0):
        threading.Timer(delay_seconds, kill_worker, [server]).start()


@pytest.mark.parametrize(
    "disturbance", [kill_worker, kill_server, kill_both, stop_cleanly, kill_the_worker_three_times]
)
def test_a_program_does_not_notice(
    disturbance: Callable[[ServedInstallation], None], server: ServedInstallation, undisturbed: Ending
) -> None:
    ending = run_program(server, lambda: disturbance(server))
    assert ending.optimizer_steps == [float(step) for step in range(1, ROUNDS + 1)], "each step ran exactly once"
    assert ending == undisturbed


def test_results_are_readable_after_everything_died(server: ServedInstallation) -> None:
    """Trap 8 and 9: reading does not delete, and no process holds a result alone."""
    with service_client(server) as client:
        model = client.create_lora_training_client(MODEL, rank=4, seed=1).result()
        future = model.forward_backward([next_token_datum(TOKENS[0])], "cross_entropy")
        first = exact_logprobs(future.result())
        request_id = f"{model.model_id}:op:1"
        kill_both(server)
        for _ in range(2):
            answer = server.post("/api/v1/retrieve_future", {"request_id": request_id, "allow_metadata_only": False})
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("application/x-protobuf")
        again = model.forward([next_token_datum(TOKENS[0])], "cross_entropy")
        assert exact_logprobs(again.result()) == first
