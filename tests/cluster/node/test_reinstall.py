"""Uninstalling takes away programs, not data; the next install finds it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.node.conftest import EXAMPLES, MODEL, SESSION, wait_gone
from support.client.sdk import QUESTION, adam, exact_logprobs, next_token_datum
from support.kubernetes.installation import Installation, wait_for


@pytest.fixture
def installed_again(installation: Installation) -> Iterator[None]:
    """However the test ends, the next one finds the chart installed."""
    yield
    installation.install()
    installation.wait_answering()


def test_a_session_deleted_with_retain_is_found_again_by_its_successor(
    installation: Installation, session: str
) -> None:
    worker_id = (installation.get("trainingsession", session) or {})["status"]["workerId"]
    with installation.service_client() as service:
        model = service.create_lora_training_client(MODEL, rank=4, seed=3).result()
        data = [next_token_datum(QUESTION)]
        model.forward_backward(data, "cross_entropy").result()
        model.optim_step(adam()).result()
        before = exact_logprobs(model.forward(data, "cross_entropy").result())
        installation.kubectl("delete", "trainingsession", session)
        wait_gone(installation, "pod", f"{session}-0")
        installation.apply(EXAMPLES / "session.yaml")
        installation.wait_ready(session)
        assert (installation.get("trainingsession", session) or {})["status"]["workerId"] == worker_id
        assert exact_logprobs(model.forward(data, "cross_entropy").result()) == before


@pytest.mark.usefixtures("installed_again")
def test_uninstall_and_reinstall_leave_nothing_stuck_and_find_the_data_again(
    installation: Installation, session: str, tmp_path: Path
) -> None:
    with installation.service_client() as service:
        model = service.create_lora_training_client(MODEL, rank=4, seed=5).result()
        data = [next_token_datum(QUESTION)]
        model.forward_backward(data, "cross_entropy").result()
        model.optim_step(adam()).result()
        saved = model.save_state("kept").result().path
        before = exact_logprobs(model.forward(data, "cross_entropy").result())

    installation.uninstall()
    assert (installation.get("trainingsession", SESSION) or {})["metadata"].get("finalizers") is None
    assert not installation.list("deployment", f"app.kubernetes.io/instance={installation.release}")

    installation.install()
    installation.wait_answering()
    installation.wait_ready(SESSION)
    with installation.service_client() as service:
        resumed = service.create_training_client_from_state_with_optimizer(saved).result()
        assert exact_logprobs(resumed.forward(data, "cross_entropy").result()) == before


@pytest.mark.usefixtures("installed_again")
def test_a_session_can_be_deleted_while_no_operator_runs(installation: Installation, session: str) -> None:
    installation.uninstall()
    installation.kubectl("delete", "trainingsession", SESSION, "--timeout=60s")
    wait_for(lambda: installation.get("pod", f"{SESSION}-0") is None, 120, lambda: "the worker outlives its session")
