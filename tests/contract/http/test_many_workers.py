"""Several workers for one base model: who gets a model, what it waits for, and what happens when workers go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.server.fake_fleet import BASE_MODEL, FakeFleet, FakeHandle
from support.server.fake_worker import FakeWorker, json_result
from support.server.http_server import TestedServer, one_server, running_server, settings_for
from tinsmith_rpc import RELEASE_SEQ_ID, worker_pb2
from tinsmith_server.errors import WorkerUnstartable
from tinsmith_server.fleet.base import ServedModel, WorkerClient
from tinsmith_server.store.records import Model
from tinsmith_server.store.store import Store, open_store

pytestmark = pytest.mark.core

SLOTS = 2


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFleet]:
    """Two workers with two slots each, for one base model whose adapters have rank 64 at most."""
    monkeypatch.setattr("tinsmith_server.services.training.placement.RECHECK_SECONDS", 0.02)
    monkeypatch.setattr("tinsmith_server.services.training.binding.RETRY_SECONDS", 0.02)
    monkeypatch.setattr("tinsmith_server.services.training.binding.ATTEMPT_SECONDS", 0.1)
    # The first word on why a model waits is another file's promise; here a busy disk brought it before the model.
    monkeypatch.setattr("tinsmith_server.services.training.binding.FIRST_WORD_SECONDS", 60)
    served = ServedModel(BASE_MODEL, "tiny-1", max_rank=64)
    fleet = FakeFleet([served], [FakeHandle(name, "tiny-1", SLOTS) for name in ("w1", "w2")])
    yield fleet
    fleet.cleanup()


@pytest.fixture
async def server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    async with running_server(settings_for(tmp_path), fleet) as server:
        yield server


def models_at(fleet: FakeFleet, worker_id: str) -> list[str]:
    """Return the models at the worker, in the order of their creation."""
    submits = fleet.handles[worker_id].fake.operations.values()
    return [submit.model_id for submit in submits if submit.kind == worker_pb2.CREATE_MODEL]


async def until_requested(fleet: FakeFleet) -> None:
    while not fleet.slot_requests:
        await asyncio.sleep(0.001)


async def report_created(worker: FakeWorker, model_id: str) -> None:
    worker.events.append(worker_pb2.Event(event_id=1, model_created=worker_pb2.ModelCreated(model_id=model_id)))
    await worker.finish("its long poll")


async def test_a_model_without_a_slot_waits_with_a_reason_that_a_human_understands(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    fleet.capacity = "ask your administrator"
    async with running_server(settings_for(tmp_path, poll_hold_seconds=0.3), fleet) as server:
        held = [await server.model() for _ in range(2 * SLOTS)]
        server.time.pass_seconds(300)
        made = (await server.create_model(await server.session(), lora_config={"rank": 4})).json()
        await until_requested(fleet)
        answer = await server.result(made["request_id"])
        assert answer.status_code == 408
        assert answer.json()["queue_state"] == "paused_capacity"
        sessions = sorted(model_id.split(":")[0] for model_id in held)
        reason = answer.json()["queue_state_reason"]
        assert reason.startswith("waiting for one of 4 places of org/tiny; 4 held by your sessions ")
        assert reason.endswith(" and 1 more, the first of them idle for 5 min; ask your administrator")
        assert sum(session_id in reason for session_id in sessions) == 3
        assert answer.headers["x-deprecation-note"] == f"waiting: {reason}"
        assert (BASE_MODEL, 4, False) in fleet.slot_requests


async def test_a_model_accepted_for_a_worker_that_stops_goes_to_another(server: TestedServer, fleet: FakeFleet) -> None:
    fleet.handles["w1"].down = "the node is away"
    made = (await server.create_model(await server.session())).json()
    while not fleet.handles["w1"].waits:
        await asyncio.sleep(0.001)
    fleet.handles["w1"].suspended = True
    await fleet.remove("w1")
    assert (await server.result(made["request_id"])).status_code == 200
    assert models_at(fleet, "w2") == [made["model_id"]]


async def test_the_log_has_the_begin_the_reason_and_the_end_of_a_workers_refusals(
    server: TestedServer, fleet: FakeFleet, capsys: pytest.CaptureFixture[str]
) -> None:
    await fleet.remove("w2")
    worker = fleet.handles["w1"].fake

    async def model_refused_again_and_again() -> str:
        worker.disk_full, submit_count = True, len(worker.submits)
        made = (await server.create_model(await server.session())).json()
        while len(worker.submits) < submit_count + 5:
            await asyncio.sleep(0.001)
        return str(made["request_id"])

    first = await model_refused_again_and_again()
    worker.disk_full = False
    assert (await server.result(first)).status_code == 200
    await model_refused_again_and_again()

    lines = [line for line in capsys.readouterr().out.splitlines() if "worker_id=w1" in line]
    told = [line for line in lines if "new models" in line]
    assert ["refuses" in line for line in told] == [True, False, True]
    assert ["the journal's disk is full" in line for line in told] == [True, False, True]
    assert "worker accepts new models again" in told[1]
    assert not [line for line in lines if "model displaced" in line]


async def test_a_model_that_a_worker_made_for_nothing_is_released_there(server: TestedServer, fleet: FakeFleet) -> None:
    model_id = await server.model()
    stray = fleet.handles["w2"]
    await stray.connection(5)
    stray.fake.operations[model_id, 0] = worker_pb2.SubmitRequest(model_id=model_id)
    await report_created(stray.fake, model_id)
    while (model_id, RELEASE_SEQ_ID) not in stray.fake.operations:
        await asyncio.sleep(0.001)
    assert (model_id, RELEASE_SEQ_ID) not in fleet.handles["w1"].fake.operations
    assert (await server.forward_backward(model_id, 1)).status_code == 200


async def test_a_model_without_a_place_is_at_home_where_it_was_made(server: TestedServer, fleet: FakeFleet) -> None:
    """Its worker accepted it and died before it said so; when it is back, every slot has been given away."""
    for _ in range(2 * SLOTS):
        await server.model()
    waiting = (await server.create_model(await server.session())).json()
    await until_requested(fleet)
    first = fleet.handles["w1"].fake
    first.operations[waiting["model_id"], 0] = worker_pb2.SubmitRequest(model_id=waiting["model_id"])
    first.outcomes[waiting["model_id"], 0] = json_result({"model_id": waiting["model_id"]})
    await report_created(first, waiting["model_id"])
    assert (await server.result(waiting["request_id"])).json() == {"model_id": waiting["model_id"]}
    assert (waiting["model_id"], RELEASE_SEQ_ID) not in first.operations


async def test_a_model_that_is_on_its_way_elsewhere_lives_where_it_was_made_after_all(
    server: TestedServer, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker was thought lost after it had accepted it. That the next one cannot take it is no matter then."""
    first, second = fleet.handles["w1"], fleet.handles["w2"]
    answered = asyncio.Event()

    async def cannot_start(timeout_seconds: float) -> WorkerClient:
        await answered.wait()
        raise WorkerUnstartable("its model is gone")

    monkeypatch.setattr(second, "connection", cannot_start)
    first.down = "its node is away"
    made = (await server.create_model(await server.session())).json()
    model_id = made["model_id"]
    while not first.waits:
        await asyncio.sleep(0.001)
    first.suspended = True
    while (await server.services.models.owned("default", model_id)).worker_id != "w2":
        await asyncio.sleep(0.001)

    first.suspended, first.down = False, None
    await first.connection(5)
    first.fake.operations[model_id, 0] = worker_pb2.SubmitRequest(model_id=model_id)
    first.fake.outcomes[model_id, 0] = json_result({"model_id": model_id})
    await report_created(first.fake, model_id)
    while (await server.services.models.owned("default", model_id)).state != "bound":
        await asyncio.sleep(0.001)
    answered.set()
    while server.services.binding._tasks:
        await asyncio.sleep(0.001)

    assert (await server.result(made["request_id"])).json() == {"model_id": model_id}
    assert (await server.forward_backward(model_id, 1)).status_code == 200
    assert (model_id, 1) in first.fake.operations
    assert (model_id, RELEASE_SEQ_ID) not in first.fake.operations


async def test_a_model_that_its_worker_reports_is_bound_there_though_no_acknowledgement_came(
    server: TestedServer, fleet: FakeFleet
) -> None:
    """The report comes once: a model that went elsewhere after it would leave an adapter behind."""
    first = fleet.handles["w1"]

    async def lose_the_acknowledgement() -> None:
        raise ConnectionResetError

    first.fake.before_ack = lose_the_acknowledgement
    made = (await server.create_model(await server.session())).json()
    while not first.fake.operations:
        await asyncio.sleep(0.001)
    await report_created(first.fake, made["model_id"])
    while server.services.binding.on_its_way(made["model_id"]):
        await asyncio.sleep(0.001)
    assert (await server.result(made["request_id"])).status_code == 200
    first.suspended = True
    await server.services.binding.resume()
    assert (await server.result(made["request_id"])).status_code == 200
    assert models_at(fleet, "w2") == []


async def test_a_worker_that_goes_and_comes_back_at_once_is_followed_again(
    server: TestedServer, fleet: FakeFleet
) -> None:
    model_id = await server.model()
    gone, returned = fleet.handles["w1"], FakeHandle("w1", "tiny-1", SLOTS)
    gone.down = "given up"
    await gone.close()
    returned.fake = gone.fake
    returned.fake.lose_memory()
    fleet.handles["w1"] = returned
    await fleet.add(returned)
    await returned.connection(5)
    corrupted = worker_pb2.ModelCorrupted(model_id=model_id, reason="its snapshot is damaged")
    gone.fake.events.append(worker_pb2.Event(event_id=9, model_corrupted=corrupted))
    await gone.fake.finish("its long poll")
    async with asyncio.timeout(60):
        while not (await server.client.get(f"/training_runs/{model_id}")).json()["corrupted"]:
            await asyncio.sleep(0.01)


async def test_models_at_a_worker_that_will_be_taken_away_are_saved_and_released(
    server: TestedServer, fleet: FakeFleet
) -> None:
    model_id = await server.model()
    fleet.handles["w1"].goes = True
    await server.services.background.reap_now()
    listed = (await server.client.get(f"/training_runs/{model_id}/checkpoints")).json()["checkpoints"]
    assert [one["checkpoint_id"] for one in listed] == ["weights/autosave"]
    assert (await server.result(f"{model_id}:op:0")).status_code == 200
    await fleet.remove("w1")
    late = await server.result(f"{model_id}:op:0")
    assert late.status_code == 410
    why = f"{model_id} was released because worker w1 was deleted. It was saved before: resume from tinker://{model_id}"
    assert f"{why}/weights/autosave." in late.text
    assert fleet.handles.get("w1") is None
    other = await server.model()
    assert models_at(fleet, "w2") == [other]


async def test_a_model_of_an_ended_session_is_released_when_its_suspended_worker_is_back(
    server: TestedServer, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile it keeps its slot, and others need not wait for it."""
    monkeypatch.setattr("tinsmith_server.services.background.reaper.REACH_SECONDS", 0.1)
    away = fleet.handles["w1"]
    session_id = await server.session()
    made = (await server.create_model(session_id)).json()
    await server.result(made["request_id"])
    away.down, away.suspended = "it is suspended", True
    away.waits.clear()
    await server.post(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    await server.services.background.reap_now()
    assert max(away.waits) <= 0.1
    assert (made["model_id"], RELEASE_SEQ_ID) not in away.fake.operations
    away.down, away.suspended = None, False
    await server.services.background.reap_now()
    assert (made["model_id"], RELEASE_SEQ_ID) in away.fake.operations
    assert (await server.result(made["request_id"])).status_code == 200


async def test_models_of_a_permanently_lost_worker_are_corrupted_and_free_their_slots(
    server: TestedServer, fleet: FakeFleet
) -> None:
    model_id = await server.model()
    await fleet.remove("w1")
    await server.services.background.write_off_now()
    assert (await server.client.get(f"/training_runs/{model_id}")).json()["corrupted"] is False
    fleet.lost["w1"] = "its volume was deleted"
    await server.services.background.write_off_now()
    failed = await server.outcome(await server.forward_backward(model_id, 1))
    assert failed["category"] == "server"
    assert "its volume was deleted; its checkpoints are kept" in failed["error"]
    assert (await server.client.get(f"/training_runs/{model_id}")).json()["corrupted"] is True


async def test_a_releaser_that_slept_while_a_model_got_its_place_releases_it_there(
    server: TestedServer, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await server.model()
    read = Store.live_models_of_session
    long_ago = [replace(await server.services.models.owned("default", model_id), worker_id="", state="accepted")]

    async def slept(store: Store, session_id: str) -> Sequence[Model]:
        return [long_ago.pop()] if long_ago else await read(store, session_id)

    monkeypatch.setattr(Store, "live_models_of_session", slept)
    await server.post(f"/sessions/{model_id.split(':')[0]}/finish", {"reason": {"type": "success"}, "detail": None})
    for _ in range(2):
        await server.services.background.reap_now()
    assert long_ago == []
    assert (await server.services.models.owned("default", model_id)).state == "released"
    told = [handle for handle in fleet.handles.values() if (model_id, RELEASE_SEQ_ID) in handle.fake.operations]
    assert len(told) == 1


async def test_weights_for_nothing_but_samples_are_not_saved_where_no_worker_samples(
    server: TestedServer, fleet: FakeFleet
) -> None:
    fleet.served[BASE_MODEL] = ServedModel(BASE_MODEL, "tiny-1", sampling=False)
    model_id = await server.model()
    unnamed = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0}
    refused = await server.outcome(await server.post("/save_weights_for_sampler", unnamed))
    assert "is served for training only" in refused["error"]
    named = {"model_id": model_id, "seq_id": 2, "path": "kept"}
    saved = await server.outcome(await server.post("/save_weights_for_sampler", named))
    assert saved["path"].endswith("/sampler_weights/kept")


@one_server
async def test_a_replica_that_does_not_know_its_workers_is_ready_only_where_no_other_is(
    server: TestedServer, fleet: FakeFleet
) -> None:
    fleet.not_ready = "the sessions are not known"
    assert (await server.client.get("/readyz")).status_code == 200
    other = await open_store(server.services.settings.store_url)
    await other.announce_replica("another replica", 60)
    response = await server.client.get("/readyz")
    assert (response.status_code, response.json()) == (503, {"detail": "the sessions are not known"})
    assert (await server.client.get("/healthz")).status_code == 200
    fleet.not_ready = None
    assert (await server.client.get("/readyz")).status_code == 200
    await other.close()
