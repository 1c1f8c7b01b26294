"""Runs as their owner watches them: state, progress and the series of steps, in parts and live."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import orjson
import pytest
from support.server.http_server import TestedServer
from tinsmith_server.routes import runs
from tinsmith_server.services.rows import RowCache
from tinsmith_server.services.runs import series
from tinsmith_server.store.connection import StoreUnavailable

pytestmark = pytest.mark.core


async def trained(server: TestedServer, steps: int, **fields: Any) -> str:
    """Return a model that has made some steps, after the server has applied what the worker reported."""
    made = (await server.create_model(await server.session(), **fields)).json()
    await server.result(made["request_id"])
    model_id = str(made["model_id"])
    for number in range(1, steps + 1):
        body = {"model_id": model_id, "seq_id": number, "adam_params": {"learning_rate": number / 8}}
        await server.outcome(await server.post("/optim_step", body))
    await server.services._events.drain(server.handle.worker_id)
    return model_id


async def metrics(server: TestedServer, model_id: str, **cursors: int) -> dict[str, Any]:
    answer: dict[str, Any] = (await server.client.get(f"/training_runs/{model_id}/metrics", params=cursors)).json()
    return answer


@pytest.mark.core("GET /api/v1/training_runs", "GET /api/v1/training_runs/{run_id}")
async def test_a_run_says_how_far_it_is(server: TestedServer) -> None:
    model_id = await trained(server, 3, user_metadata={"tinsmith-total-steps": "10"})
    run = (await server.client.get(f"/training_runs/{model_id}", params={"losses": 2})).json()
    assert (run["state"], run["progress"]["step"], run["progress"]["total_steps"]) == ("ready", 3, 10)
    assert run["progress"]["loss"] == pytest.approx(1 / 3)
    assert run["progress"]["eta_seconds"] >= 0
    assert run["last_request_time"] >= run["progress"]["last_step_at"]
    assert run["losses"] == [pytest.approx(1 / 2), pytest.approx(1 / 3)]
    [listed] = (await server.client.get("/training_runs")).json()["training_runs"]
    assert "losses" not in listed
    assert listed == {name: value for name, value in run.items() if name != "losses"}


async def test_a_run_without_steps_or_with_a_total_that_is_no_number_has_neither_progress_nor_an_end(
    server: TestedServer,
) -> None:
    without = await trained(server, 0)
    assert "progress" not in (await server.client.get(f"/training_runs/{without}")).json()
    for total in ("many", "-1", "٣", "9" * 40):
        model_id = await trained(server, 2, user_metadata={"tinsmith-total-steps": total})
        progress = (await server.client.get(f"/training_runs/{model_id}")).json()["progress"]
        assert progress.keys() >= {"step", "loss"}
        assert "total_steps" not in progress
        assert "eta_seconds" not in progress


async def test_a_run_is_called_by_its_own_name_or_by_that_of_its_session(server: TestedServer) -> None:
    named = {"tags": [], "user_metadata": {}, "sdk_version": "0", "display_name": "melting points"}
    session_id = (await server.post("/create_session", named)).json()["session_id"]
    await server.create_model(session_id, 0)
    await server.create_model(session_id, 1, user_metadata={"name": "a higher rate"})
    runs = (await server.client.get("/training_runs")).json()["training_runs"]
    assert [run["display_name"] for run in runs] == ["a higher rate", "melting points"]


@pytest.mark.core("GET /api/v1/training_runs/{run_id}/metrics")
async def test_a_series_is_read_in_parts_behind_a_cursor(server: TestedServer) -> None:
    model_id = await trained(server, 5)
    first = await metrics(server, model_id, limit=3)
    assert [one["step"] for one in first["steps"]] == [1, 2, 3]
    assert first["steps"][1].items() >= {"position": 2, "steps": 1, "tokens": 2, "learning_rate": 0.25}.items()
    assert "sampler_gap" not in first["steps"][0]
    assert first["more"]
    rest = await metrics(server, model_id, after=first["after"])
    assert [one["step"] for one in rest["steps"]] == [4, 5]
    assert (rest["more"], rest["after"]) == (False, 5)
    assert await metrics(server, model_id, after=5) == rest | {"steps": []}


async def test_a_long_series_is_not_written_in_the_event_loop(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id, threads = await trained(server, 1), []

    def noted(part: series.SeriesPart) -> str:
        threads.append(threading.current_thread())
        return write(part)

    write = runs._part_json
    monkeypatch.setattr(runs, "_part_json", noted)
    assert len((await metrics(server, model_id))["steps"]) == 1
    assert threading.current_thread() not in threads


@pytest.mark.core("POST /api/v1/training_runs/{run_id}/metrics")
async def test_what_a_program_reports_stands_next_to_its_steps(server: TestedServer) -> None:
    model_id = await trained(server, 1)
    path = f"/training_runs/{model_id}/metrics"
    points = [{"step": 1, "values": {"eval/nll": 2.5, "unknown": None}}, {"step": 2, "values": {"nothing": None}}]
    assert (await server.post(path, {"metrics": points})).json() == {}
    again = {"metrics": [{"step": 1, "values": {"reward": 1}}], "total_steps": 40}
    assert (await server.post(path, again)).json() == {}
    assert (await server.client.get(f"/training_runs/{model_id}")).json()["progress"]["total_steps"] == 40
    [reported] = (await metrics(server, model_id))["reported"]
    assert (reported["step"], reported["values"]) == (1, {"eval/nll": 2.5, "reward": 1.0})
    assert (await metrics(server, model_id, after_reported=reported["revision"]))["reported"] == []


@pytest.mark.parametrize(
    ("point", "sentence"),
    [
        ({"step": -1, "values": {}}, "step"),
        ({"step": 1, "values": {"a": "high"}}, "values.a"),
        ({"step": 1, "values": {"n" * 129: 1.0}}, "values"),
        ({"step": 1, "values": {str(number): 1.0 for number in range(65)}}, "64"),
        ({"step": 1, "values": {"a": 1.0}, "time": "yesterday"}, "time"),
        ({"step": 1, "values": {"a": 1.0}, "time": "0001-01-01T00:00:00+14:00"}, "time"),
        ({"step": 1, "values": {"a": 1.0}, "time": "9999-12-31T23:59:59-12:00"}, "time"),
    ],
)
async def test_a_report_that_cannot_be_read_is_refused_with_its_field(
    server: TestedServer, point: dict[str, Any], sentence: str
) -> None:
    model_id = await trained(server, 0)
    refused = await server.post(f"/training_runs/{model_id}/metrics", {"metrics": [point]})
    assert refused.status_code == 422
    assert sentence in refused.json()["detail"]
    assert (await metrics(server, model_id))["reported"] == []


async def test_a_run_with_too_many_reports_is_told_the_limit(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.services.run_series, "_most_report_bytes", 30)
    model_id = await trained(server, 0)
    path = f"/training_runs/{model_id}/metrics"
    assert (await server.post(path, {"metrics": [{"step": 1, "values": {"a": 1.0}}]})).status_code == 200
    refused = await server.post(path, {"metrics": [{"step": 2, "values": {"name-of-a-metric": 1.25}}]})
    assert (refused.status_code, "reported_metrics_bytes_per_run" in refused.json()["detail"]) == (422, True)


async def test_the_series_of_another_tenant_look_as_if_they_were_not_there(server: TestedServer) -> None:
    model_id = await trained(server, 1)
    other = {"headers": {"X-API-Key": (await server.services.keys.create("another", "theirs")).secret}}
    for path in ("", "/metrics", "/metrics/live"):
        answer = await server.client.get(f"/training_runs/{model_id}{path}", **other)
        assert (answer.status_code, answer.json()["detail"]) == (404, f"there is no model {model_id}")
    reported = await server.post(f"/training_runs/{model_id}/metrics", {"metrics": []}, **other)
    assert reported.status_code == 404


@pytest.mark.core("GET /api/v1/training_runs/{run_id}/metrics/live", "GET /api/v1/training_runs/live")
async def test_live_streams_send_what_is_new_until_the_server_stops(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOOK_SECONDS", 0.01), ("ALIVE_LOOKS", 2)):
        monkeypatch.setattr(series, name, value)
    monkeypatch.setattr(server.services.run_series, "_digests", RowCache(0))
    model_id = await trained(server, 2)
    curve = asyncio.create_task(server.client.get(f"/training_runs/{model_id}/metrics/live", params={"after": 1}))
    listed = asyncio.create_task(server.client.get("/training_runs/live"))
    await asyncio.sleep(0.2)
    report = {"metrics": [{"step": 2, "values": {"reward": 0.5}}]}
    await server.post(f"/training_runs/{model_id}/metrics", report)
    await asyncio.sleep(0.2)
    server.services.long_polls.release()
    assert (await curve).headers["content-type"].startswith("text/event-stream")
    events = [orjson.loads(line[6:]) for line in (await curve).text.splitlines() if line.startswith("data: ")]
    assert [len(event["steps"]) for event in events] == [1, 0]
    assert (events[0]["after"], events[1]["reported"][0]["values"]) == (2, {"reward": 0.5})
    assert ": alive" in (await curve).text
    assert (await listed).text.count("data: {}") == 2


async def test_a_stream_ends_so_that_its_client_shows_its_key_again(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOOK_SECONDS", 0.01), ("STREAM_LOOKS", 3)):
        monkeypatch.setattr(series, name, value)
    model_id = await trained(server, 1)
    for path in ("/training_runs/live", f"/training_runs/{model_id}/metrics/live"):
        assert (await server.client.get(path)).text.count("data: ") == 1


async def test_a_stream_ends_without_a_crash_when_the_store_fails(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "LOOK_SECONDS", 0.01)
    model_id = await trained(server, 1)
    answers: list[Any] = [await server.services._store.run_steps(model_id, 0, 10)]

    async def once(*_: object) -> Any:
        if not answers:
            raise StoreUnavailable("the database restarts")
        return answers.pop()

    monkeypatch.setattr(server.services._store, "run_steps", once)
    assert (await server.client.get(f"/training_runs/{model_id}/metrics/live")).text.count("data: ") == 1
    assert (await server.client.get(f"/training_runs/{model_id}/metrics/live")).status_code == 503


async def test_the_streams_of_a_tenant_look_together(server: TestedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look counts all runs of the tenant, so each open page would cost as much."""
    looks: list[str] = []

    async def counted(tenant: str) -> list[object]:
        looks.append(tenant)
        await asyncio.sleep(0)
        return [len(looks)]

    monkeypatch.setattr(server.services._store, "runs_digest", counted)
    streams = [server.services.run_series.live_list("ada") for _ in range(5)]
    assert await asyncio.gather(*(anext(stream) for stream in streams)) == [True] * 5
    assert looks == ["ada"]
    for stream in streams:
        await stream.aclose()


async def test_a_tenant_may_hold_a_limited_number_of_streams(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(series, "LIVE_STREAMS", 1)
    held = asyncio.create_task(server.client.get("/training_runs/live"))
    await asyncio.sleep(0.1)
    refused = await server.client.get("/training_runs/live")
    assert (refused.status_code, "close some, or poll" in refused.json()["detail"]) == (429, True)
    server.services.long_polls.release()
    await held
