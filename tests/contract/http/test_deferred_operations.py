"""Operations that are accepted while their worker cannot be reached: they run later, in order, and exactly once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for
from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2
from tinsmith_server.services.background import tasks
from tinsmith_server.services.training import submission

pytestmark = pytest.mark.core

WAKING = "waking session tiny: no client has used it for some time"


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "DEFER_AFTER_SECONDS", 0.01)
    monkeypatch.setattr(submission, "REACH_SECONDS", 0.01)
    monkeypatch.setattr(submission, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(tasks, "DELIVER_SECONDS", 0.05)


def numbers(server: TestedServer) -> list[int]:
    return [request.seq_id for request in server.worker.submits if request.seq_id]


async def deferred(server: TestedServer, model_id: str, *seq_ids: int) -> list[str]:
    """Submit while the worker is away. Return the futures."""
    server.handle.down = WAKING
    answers = [await server.forward_backward(model_id, seq_id) for seq_id in seq_ids]
    assert [answer.status_code for answer in answers] == [200] * len(seq_ids)
    return [answer.json()["request_id"] for answer in answers]


async def test_a_call_for_an_absent_worker_is_accepted_and_its_user_hears_why_it_waits(server: TestedServer) -> None:
    model_id = await server.model()
    server.handle.down = WAKING
    first, second = [await server.forward_backward(model_id, number) for number in (1, 2)]
    assert first.json()["request_id"] == f"{model_id}:op:1"
    assert first.headers["x-deprecation-note"] == f"waiting: {WAKING}"
    assert "x-deprecation-note" not in second.headers
    assert numbers(server) == []


async def test_the_poll_of_a_deferred_call_says_why_it_waits_and_delivers_it_when_the_worker_is_back(
    hasty_server: TestedServer,
) -> None:
    model_id = await hasty_server.model()
    [future] = await deferred(hasty_server, model_id, 1)
    waiting = await hasty_server.result(future)
    assert (waiting.status_code, waiting.json()["queue_state_reason"]) == (408, WAKING)
    assert waiting.headers["x-deprecation-note"] == f"waiting: {WAKING}"
    assert "x-deprecation-note" not in (await hasty_server.result(future)).headers
    hasty_server.handle.down = None
    while (answer := await hasty_server.result(future)).status_code == 408:
        pass
    assert answer.status_code == 200
    assert numbers(hasty_server) == [1]


async def test_a_call_that_its_worker_does_not_acknowledge_in_time_is_accepted_and_runs_once(
    hasty_server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.fleet.client.SUBMIT_TIMEOUT_SECONDS", 0.2)
    model_id = await hasty_server.model()
    hasty_server.worker.before_ack = asyncio.Event().wait
    submitted = await hasty_server.forward_backward(model_id, 1)
    assert submitted.status_code == 200
    assert "the worker has not answered Submit for 0.2 s" in submitted.headers["x-deprecation-note"]
    hasty_server.worker.before_ack = None
    while (answer := await hasty_server.result(submitted.json()["request_id"])).status_code == 408:
        pass
    assert answer.status_code == 200
    assert list(hasty_server.worker.operations) == [(model_id, 0), (model_id, 1)]


async def test_a_later_call_is_delivered_after_the_deferred_ones(server: TestedServer) -> None:
    """An optim_step that overtook a forward_backward would close its gap, and the step would miss its gradient."""
    model_id = await server.model()
    await deferred(server, model_id, 1, 2)
    server.handle.down = None
    await server.post("/optim_step", {"model_id": model_id, "seq_id": 3})
    assert numbers(server) == [1, 2, 3]


async def test_a_deferred_call_is_delivered_without_a_poll(server: TestedServer) -> None:
    model_id = await server.model()
    await deferred(server, model_id, 1)
    server.handle.down = None
    async with asyncio.timeout(30):
        while numbers(server) != [1]:
            await asyncio.sleep(0.05)


async def test_a_deferred_call_survives_the_server(tmp_path: Path, fleet: FakeFleet) -> None:
    settings = settings_for(tmp_path)
    async with running_server(settings, fleet) as server:
        model_id = await server.model()
        [future] = await deferred(server, model_id, 1)
    async with running_server(settings, fleet) as server:
        server.handle.down = None
        assert (await server.result(future)).status_code == 200
        assert (model_id, 1) in server.worker.operations


async def test_a_call_that_is_sent_again_is_deferred_once(server: TestedServer) -> None:
    model_id = await server.model()
    await deferred(server, model_id, 1)
    await deferred(server, model_id, 1)
    server.handle.down = None
    await server.forward_backward(model_id, 2)
    assert numbers(server) == [1, 2]


async def test_a_deferred_save_learns_at_its_delivery_whether_its_name_is_taken(server: TestedServer) -> None:
    model_id = await server.model()
    await server.outcome(await server.save(model_id, 1, "taken"))
    server.handle.down = WAKING
    assert (await server.save(model_id, 2, "taken")).status_code == 200
    server.handle.down = None
    await server.forward_backward(model_id, 3)
    save = worker_pb2.SaveWeights.FromString(server.worker.submits[-2].payload)
    assert (save.name, save.name_taken) == ("taken", True)


async def test_a_model_ends_after_its_deferred_calls(server: TestedServer) -> None:
    model_id = await server.model()
    await deferred(server, model_id, 1)
    server.handle.down = None
    await server.outcome(await server.post("/unload_model", {"model_id": model_id}))
    assert numbers(server) == [1, RELEASE_SEQ_ID]


async def test_a_call_beyond_the_space_for_deferred_calls_is_refused_and_says_so(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await server.model()
    await deferred(server, model_id, 1)
    monkeypatch.setattr(submission, "MOST_DEFERRED_BYTES", 1)
    refused = await server.forward_backward(model_id, 2)
    assert refused.status_code == 503
    assert "already wait for workers" in refused.json()["detail"]


async def test_a_call_that_the_worker_numbers_is_not_deferred(server: TestedServer) -> None:
    model_id = await server.model()
    server.handle.down = WAKING
    refused = await server.post("/optim_step", {"model_id": model_id})
    assert (refused.status_code, refused.json()["detail"]) == (503, WAKING)


async def test_a_full_disk_keeps_a_deferred_call_waiting(hasty_server: TestedServer) -> None:
    model_id = await hasty_server.model()
    [future] = await deferred(hasty_server, model_id, 1)
    hasty_server.handle.down, hasty_server.worker.disk_full = None, True
    while (waiting := await hasty_server.result(future)).json()["queue_state_reason"] == WAKING:
        pass
    assert (waiting.status_code, waiting.json()["queue_state_reason"]) == (408, "the journal's disk is full")
    hasty_server.worker.disk_full = False
    while (answer := await hasty_server.result(future)).status_code == 408:
        pass
    assert answer.status_code == 200


async def test_the_deferred_calls_of_a_lost_model_fail_with_the_models_reason(server: TestedServer) -> None:
    model_id = await server.model()
    [future] = await deferred(server, model_id, 1)
    server.worker.lose_volume()
    server.handle.down = None
    answer = await server.result(future)
    assert "has lost its volume" in answer.json()["error"]
