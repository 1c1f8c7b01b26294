"""Sessions over HTTP: their life, and what is refused once it is over."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from support.server.fake_fleet import FakeFleet
from support.server.http_server import TestedServer, running_server, settings_for

pytestmark = pytest.mark.core

SUCCESS = {"reason": {"type": "success"}, "detail": None}


async def test_a_finished_session_takes_no_new_work(server: TestedServer) -> None:
    model_id = await server.model()
    session_id = model_id.split(":", maxsplit=1)[0]
    sampler = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "org/tiny"}
    await server.post(f"/sessions/{session_id}/finish", SUCCESS)
    refused = [
        await server.create_model(session_id, 1),
        await server.forward_backward(model_id, 1),
        await server.save(model_id, 1, "late"),
        await server.post("/create_sampling_session", sampler),
    ]
    assert [response.status_code for response in refused] == [410] * 4
    assert "the client closed it" in refused[0].json()["detail"]


async def test_results_of_work_accepted_before_the_finish_stay_readable(server: TestedServer) -> None:
    model_id = await server.model()
    server.worker.withheld.add((model_id, 1))
    await server.forward_backward(model_id, 1)
    await server.post(f"/sessions/{model_id.split(':', maxsplit=1)[0]}/finish", SUCCESS)
    await server.worker.finish((model_id, 1))
    assert (await server.result(f"{model_id}:op:1")).status_code == 200


async def test_a_server_that_stops_leaves_its_chores_to_the_next_one_at_once(tmp_path: Path, fleet: FakeFleet) -> None:
    """In an upgrade, waiting models would otherwise wait until leases have expired."""
    async with running_server(settings_for(tmp_path), fleet) as first:
        model_id = await first.model()
        await first.services.background.reap_now()
    async with running_server(settings_for(tmp_path), fleet, first.time) as successor:
        await successor.post(f"/sessions/{model_id.split(':', maxsplit=1)[0]}/finish", SUCCESS)
        await successor.services.background.reap_now()
        assert (await successor.services.models.owned("default", model_id)).state == "released"


@pytest.mark.core("POST /api/v1/sessions/{session_id}/finish")
async def test_the_first_finish_wins(server: TestedServer) -> None:
    session_id = await server.session()
    for type_ in ("errored", "success"):
        response = await server.post(f"/sessions/{session_id}/finish", {"reason": {"type": type_}, "detail": type_})
        assert (response.status_code, response.json()) == (200, {})
    assert "after an error" in (await server.create_model(session_id)).json()["detail"]


async def test_a_finished_session_frees_its_models_without_saving_them(server: TestedServer) -> None:
    model_id = await server.model()
    await server.post(f"/sessions/{model_id.split(':', maxsplit=1)[0]}/finish", SUCCESS)
    await server.services.background.reap_now()
    assert (await server.client.get(f"/training_runs/{model_id}/checkpoints")).json()["checkpoints"] == []
    assert (await server.services.models.owned("default", model_id)).state == "released"


async def test_silence_counts_from_the_servers_start(server: TestedServer) -> None:
    session_id = await server.session()
    server.time.pass_seconds(899)
    await server.services.background.reap_now()
    assert (await server.post("/session_heartbeat", {"session_id": session_id})).status_code == 200


async def test_a_host_that_slept_does_not_take_its_sleep_for_the_clients_silence(server: TestedServer) -> None:
    session_id = await server.session()
    server.time.pass_seconds(1200)
    await server.services.background.reap_now()
    assert (await server.post("/session_heartbeat", {"session_id": session_id})).status_code == 200


async def test_a_client_that_stays_away_after_the_hosts_sleep_is_reaped(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, session_timeout_seconds=30, poll_hold_seconds=5), fleet) as server:
        session_id = await server.session()
        statuses: list[int] = []
        for seconds in (1200, 29, 1):
            server.time.pass_seconds(seconds)
            await server.services.background.reap_now()
            statuses.append((await server.create_model(session_id, len(statuses))).status_code)
        assert statuses == [200, 200, 410]


async def test_a_heartbeat_that_comes_while_silent_sessions_are_ended_is_heard(
    tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_server(settings_for(tmp_path, session_timeout_seconds=30, poll_hold_seconds=5), fleet) as server:
        beat = {"session_id": await server.session()}
        reap = server.services.sessions.reap

        async def beaten_before(session_id: str, last_heartbeat_before: datetime) -> None:
            await server.post("/session_heartbeat", beat)
            await reap(session_id, last_heartbeat_before)

        monkeypatch.setattr(server.services.sessions, "reap", beaten_before)
        server.time.pass_seconds(31)
        await server.services.background.reap_now()
        assert (await server.post("/session_heartbeat", beat)).status_code == 200


@pytest.mark.parametrize(
    ("timeout", "noted"), [(900, [0, 0, 30, 30, 30, 60]), (40, [10, 20, 30, 40, 50, 60])], ids=["long", "short"]
)
async def test_the_timeout_sets_how_often_heartbeats_are_written_to_the_store(
    tmp_path: Path, fleet: FakeFleet, timeout: float, noted: list[int]
) -> None:
    """A thousand clients beat a hundred times a second, and each note is a write."""
    settings = settings_for(tmp_path, session_timeout_seconds=timeout, poll_hold_seconds=5)
    async with running_server(settings, fleet) as server:
        session_id, begun = await server.session(), server.time.now
        seen = []
        for _ in noted:
            server.time.pass_seconds(10)
            assert (await server.post("/session_heartbeat", {"session_id": session_id})).status_code == 200
            last = (await server.services.sessions.owned("default", session_id)).last_heartbeat_at
            seen.append((last - begun).total_seconds())
        assert seen == noted


@pytest.mark.core("GET /api/v1/sessions", "GET /api/v1/sessions/{session_id}")
async def test_a_session_lists_its_models_and_samplers(server: TestedServer) -> None:
    model_id = await server.model()
    session_id = model_id.split(":", maxsplit=1)[0]
    body = {"session_id": session_id, "sampling_session_seq_id": 3, "base_model": "org/tiny"}
    sampler = (await server.post("/create_sampling_session", body)).json()["sampling_session_id"]
    assert (await server.client.get("/sessions")).json() == {"sessions": [session_id]}
    found = (await server.client.get(f"/sessions/{session_id}")).json()
    assert found == {"training_run_ids": [model_id], "sampler_ids": [sampler], "user_metadata": {}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/session_heartbeat", {"session_id": "sess-none"}),
        ("/sessions/sess-none/finish", SUCCESS),
        ("/create_model", {"session_id": "sess-none", "model_seq_id": 0, "base_model": "org/tiny"}),
    ],
)
async def test_an_unknown_session_is_a_404(server: TestedServer, path: str, body: dict[str, object]) -> None:
    assert (await server.post(path, body)).status_code == 404
