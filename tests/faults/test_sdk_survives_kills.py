"""`kill -9` of the worker, of the server, of both, in the middle of a pipelined SDK program.

The program does not notice; every acknowledged operation runs exactly once; the final adapter weights
and optimizer state equal those of an undisturbed run bit for bit, or within rounding. Real SDK, real engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.client.pipelined_program import TINY_MODEL, TOKENS, Ending, run_on
from support.client.sdk import exact_logprobs, next_token_datum, service_client
from support.server.serve_process import ServedInstallation

FLOAT32_ROUNDING = 1e-4
"""The bound on logprobs with fast numerics in float32."""


@pytest.fixture
def server(tmp_path: Path, tiny_model: Path) -> Iterator[ServedInstallation]:
    installation = ServedInstallation(tmp_path / "data", {TINY_MODEL: tiny_model}).start()
    yield installation
    installation.stop()


def kill_worker(server: ServedInstallation) -> None:
    server.kill_workers()


def kill_server(server: ServedInstallation) -> None:
    """Kill the server. Its worker ends with the pipe; the new server starts a new one on the same journal."""
    server.kill()
    server.start()


def kill_both(server: ServedInstallation) -> None:
    server.kill_workers()
    kill_server(server)


def stop_cleanly(server: ServedInstallation) -> None:
    assert server.stop() == 0
    server.start()


def kill_the_worker_three_times(server: ServedInstallation) -> None:
    """Kill the worker three times, the later two while it starts or replays."""
    kill_worker(server)
    for delay_seconds in (2.0, 4.0):
        time.sleep(delay_seconds)
        kill_worker(server)


@pytest.mark.parametrize(
    "disturbance",
    [
        kill_server,
        pytest.param(kill_both, marks=pytest.mark.core("durability 15")),
        stop_cleanly,
        kill_the_worker_three_times,
    ],
)
def test_a_program_does_not_notice(
    disturbance: Callable[[ServedInstallation], None], server: ServedInstallation, undisturbed: Ending
) -> None:
    ending = run_on(server, server.data / "checkpoints", lambda: disturbance(server))
    assert ending.ran_each_step_once()
    assert ending == undisturbed


def test_with_fast_numerics_a_program_does_not_notice_and_a_replay_differs_by_rounding(
    tmp_path: Path, tiny_model: Path, undisturbed: Ending
) -> None:
    """The undisturbed run has exact numerics, so the bound covers both ways of computing."""
    server = ServedInstallation(tmp_path / "data", {TINY_MODEL: tiny_model}, {"numerics": "fast"}).start()
    try:
        ending = run_on(server, server.data / "checkpoints", lambda: kill_worker(server))
    finally:
        server.stop()
    assert ending.ran_each_step_once()
    for found, expected in zip(ending.logprobs, undisturbed.logprobs, strict=True):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=FLOAT32_ROUNDING)
    np.testing.assert_allclose(ending.grad_norms, undisturbed.grad_norms, rtol=FLOAT32_ROUNDING)


def test_results_are_readable_after_everything_died(server: ServedInstallation) -> None:
    """Trap 8 and 9: reading does not delete, and no process holds a result alone."""
    with service_client(server) as client:
        model = client.create_lora_training_client(TINY_MODEL, rank=4, seed=1).result()
        future = model.forward_backward([next_token_datum(TOKENS[0])], "cross_entropy")
        first = exact_logprobs(future.result())
        request_id = f"{model.model_id}:op:1"
        kill_both(server)
        for _ in range(2):
            answer = server.retrieve(request_id)
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("application/x-protobuf")
        again = model.forward([next_token_datum(TOKENS[0])], "cross_entropy")
        assert exact_logprobs(again.result()) == first
