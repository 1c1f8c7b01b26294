"""A tenant's usage, storage and audit log, and the timelines of its sessions."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.server.fake_fleet import BASE_MODEL, OTHER_MODEL, FakeFleet, FakeReplica
from support.server.fake_worker import SAVED_BYTES
from support.server.http_server import TestedServer, one_server, running_server, settings_for
from tinsmith_rpc import worker_pb2
from tinsmith_server.store.connection import StoreUnavailable
from tinsmith_server.store.store import Store

pytestmark = pytest.mark.core

HOUR = timedelta(hours=1)


@pytest.fixture
def hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


def used(
    by: str, kind: worker_pb2.UsageKind.ValueType, amount: int, hour: datetime, tenant: str = "default"
) -> worker_pb2.Usage:
    return worker_pb2.Usage(used_by=by, tenant=tenant, hour=int(hour.timestamp()), kind=kind, amount=amount)


async def usage(server: TestedServer, hour: datetime, hours: int = 1, **options: Any) -> dict[str, Any]:
    window = {"starting_on": hour.isoformat(), "ending_before": (hour + hours * HOUR).isoformat()}
    answer = await server.client.get("/billing/usage/events", params=window, **options)
    content: dict[str, Any] = answer.raise_for_status().json()
    return content


async def stranger(server: TestedServer) -> dict[str, Any]:
    """Options of another tenant's requests."""
    created = await server.services.keys.create("stranger", "laptop")
    return {"headers": {"X-API-Key": created.secret}}


@one_server
@pytest.mark.core("GET /api/v1/billing/usage/events")
async def test_usage_that_a_worker_counted_appears_once_and_only_for_its_tenant(
    server: TestedServer, hour: datetime
) -> None:
    session = {"tags": [], "user_metadata": {"run": "a", "seed": 7}, "sdk_version": "0", "project_id": "p"}
    session_id = (await server.post("/create_session", session)).json()["session_id"]
    made = await server.create_model(session_id)
    await server.result(made.json()["request_id"])
    trainer, sampler = f"{session_id}:train:0", f"{session_id}:sample:0"
    server.worker.used = [
        used(trainer, worker_pb2.TRAINING_TOKENS, 12, hour),
        used(f"{session_id}:train:1", worker_pb2.TRAINING_TOKENS, 30, hour),
        used(sampler, worker_pb2.PREFILLED_TOKENS, 5, hour),
        used(sampler, worker_pb2.CACHED_PREFILL_TOKENS, 3, hour),
        used(sampler, worker_pb2.SAMPLED_TOKENS, 9, hour),
        used(sampler, worker_pb2.SAMPLED_TOKENS, 1, hour - HOUR),
        used("other:train:0", worker_pb2.TRAINING_TOKENS, 1, hour, tenant="stranger"),
    ]
    for _ in range(2):
        await server.services.background.collect_now()

    told = await usage(server, hour)
    assert [event["event_info"] for event in told["data"]] == [
        {"type": "training", "token_count": 42},
        {"type": "sampling_sample", "token_count": 9},
        {"type": "sampling_prefill", "cached": False, "token_count": 5},
        {"type": "sampling_prefill", "cached": True, "token_count": 3},
    ]
    assert {key: value for key, value in told["data"][0].items() if key != "event_info"} == {
        "bucket_start": f"{hour:%Y-%m-%dT%H:%M:%SZ}",
        "bucket_end": f"{hour + HOUR:%Y-%m-%dT%H:%M:%SZ}",
        "base_model": BASE_MODEL,
        "user_id": "default",
        "user_name": "default",
        "session_id": session_id,
        "project_id": "p",
    }
    assert told["sessions"] == {session_id: {"user_metadata": {"run": "a", "seed": "7"}}}
    [others_usage] = (await usage(server, hour, **await stranger(server)))["data"]
    assert (others_usage["session_id"], others_usage["event_info"]["token_count"]) == ("other", 1)


@one_server
@pytest.mark.parametrize(
    ("start", "end", "sentence"),
    [
        ("2026-03-01T12:30:00Z", "2026-03-01T13:00:00Z", "starting_on must be the start of a UTC hour"),
        ("2026-03-01T12:00:00Z", "2026-03-01T13:00:01Z", "ending_before must be the start of a UTC hour"),
        ("2026-03-01T12:00:00", "2026-03-01T13:00:00Z", "starting_on must be the start of a UTC hour"),
        ("2026-03-01T12:00:00Z", "2026-03-01T12:00:00Z", "14 days at most"),
        ("2026-03-01T12:00:00Z", "2026-03-15T13:00:00Z", "14 days at most"),
        ("2999-03-01T12:00:00Z", "2999-03-01T13:00:00Z", "in the future"),
        ("9999-12-31T23:00:00-12:00", "9999-12-31T23:00:00Z", "starting_on must be the start of a UTC hour"),
        ("soon", "2026-03-01T13:00:00Z", "starting_on"),
    ],
)
async def test_a_window_that_is_none_is_a_422_that_says_why(
    server: TestedServer, start: str, end: str, sentence: str
) -> None:
    window = {"starting_on": start, "ending_before": end}
    refused = await server.client.get("/billing/usage/events", params=window)
    assert refused.status_code == 422
    assert sentence in refused.json()["detail"]


@pytest.mark.core("GET /api/v1/billing/usage/checkpoints/current")
async def test_a_named_save_counts_once_and_storage_is_reported_by_project(
    server: TestedServer, hour: datetime
) -> None:
    model_id = await server.model()
    await server.outcome(await server.save(model_id, 1, "a"))
    await server.outcome(await server.save(model_id, 2, "a", overwrite=True))
    ephemeral = {"model_id": model_id, "seq_id": 3, "sampling_session_seq_id": 0}
    await server.outcome(await server.post("/save_weights_for_sampler", ephemeral))
    # The worker's own clock runs.
    counted = [event["event_info"] for event in (await usage(server, hour, hours=2))["data"]]
    assert {event["type"] for event in counted} == {"checkpoint"}
    assert sum(event["count"] for event in counted) == 2

    current = "/billing/usage/checkpoints/current"
    assert (await server.client.get(current)).json() == {
        "data": [
            {
                "org_user_urn": "default",
                "user_name": "default",
                "checkpoint_count": 1,
                "size_bytes": SAVED_BYTES,
                "size_gigabytes": SAVED_BYTES / 1e9,
            }
        ]
    }
    assert (await server.client.get(current, params={"project_id": "p"})).json() == {"data": []}
    assert (await server.client.get(current, **await stranger(server))).json() == {"data": []}


async def audit(server: TestedServer, options: dict[str, Any] | None = None, **query: str) -> list[dict[str, Any]]:
    answer = await server.client.get("/audit", params=query, **(options or {}))
    entries: list[dict[str, Any]] = answer.raise_for_status().json()["entries"]
    return entries


async def test_actions_on_checkpoints_are_in_the_audit_log_of_their_tenant_and_day(server: TestedServer) -> None:
    assert await audit(server) == []
    model_id = await server.model()
    path = (await server.outcome(await server.save(model_id, 1, "a")))["path"]
    server.time.now = datetime.now(UTC)  # the worker's own clock runs
    url = f"/training_runs/{model_id}/checkpoints/weights/a"
    await server.post(f"{url}/publish")
    await server.client.delete(f"{url}/publish")
    await server.client.put(f"{url}/ttl", json={"ttl_seconds": 7200})
    assert (await server.post(f"{url}/publish", headers=(await stranger(server))["headers"])).status_code == 404
    await server.client.delete(url)

    entries = await audit(server)
    assert [entry["event"] for entry in entries] == [
        "checkpoint_saved",
        "checkpoint_published",
        "checkpoint_unpublished",
        "checkpoint_ttl_set",
        "checkpoint_deleted",
    ]
    assert {entry["tinker_path"] for entry in entries} == {path}
    assert entries[3]["event_details"] == {
        "tenant": "default",
        "checkpoint_type": "training",
        "ttl_seconds": 7200,
        "model_id": model_id,
        "tinker_path": path,
        "key": {"key_id": 0, "tenant": "default", "name": "the server's static key", "prefix": ""},
    }
    assert [entry["timestamp"] for entry in entries[1:]] == sorted(entry["timestamp"] for entry in entries[1:])
    assert await audit(server, event_type="checkpoints") == entries
    assert await audit(server, event_type="projects") == []
    assert await audit(server, day="2026-03-01") == []
    assert [entry["event"] for entry in await audit(server, await stranger(server))] == ["key_created"] * 2


def span(owner: str, seq_id: int, name: str, *times: float, **fields: Any) -> worker_pb2.Span:
    submitted, started, ended = times
    return worker_pb2.Span(
        owner=owner, seq_id=seq_id, name=name, submitted=submitted, started=started, ended=ended, **fields
    )


async def test_a_trace_has_its_sessions_spans_alone_and_parts_lie_in_their_whole(server: TestedServer) -> None:
    model_id = await server.model()
    session_id = model_id.split(":")[0]
    server.worker.spans = [
        span(model_id, 1, "forward_backward", 10.0, 10.5, 12.0),
        span(model_id, 2, "optim_step", 10.1, 12.0, 12.5),
        span(model_id, 3, "forward_backward", 13.0, 13.0, 14.0, failed=True),
        span("sess-other:train:0", 1, "forward", 10.0, 10.5, 12.0),
    ]
    exported = (await server.client.get(f"/sessions/{session_id}/trace_export")).json()
    assert exported["status"] == "ready"
    got = await server.client.get(urlsplit(exported["url"]).path.removeprefix("/api/v1"), headers={"X-API-Key": ""})
    events = [event for event in json.loads(got.content)["traceEvents"] if event["ph"] == "X"]

    assert {event["args"]["request_id"] for event in events} == {f"{model_id}:op:{number}" for number in (1, 2, 3)}
    first = [event for event in events if event["args"]["request_id"].endswith(":1")]
    assert [(event["name"], event["ts"], event["dur"]) for event in first] == [
        ("forward_backward", 10_000_000, 2_000_000),
        ("waiting", 10_000_000, 500_000),
        ("computing", 10_500_000, 1_500_000),
    ]
    # The second came while the first one was there, so it is on another track; the third has the first one's again.
    assert [event["tid"] for event in events if event["name"] in ("forward_backward", "optim_step")] == [1, 2, 1]
    assert [event["args"]["state"] for event in events][-1] == "failed"


@pytest.mark.core("GET /api/v1/sessions/{session_id}/trace_export", "GET /api/v1/traces/{token}")
async def test_a_link_to_a_trace_is_its_tenants_to_give_and_ends_by_itself(server: TestedServer) -> None:
    session_id = await server.session()
    assert (
        await server.client.get(f"/sessions/{session_id}/trace_export", **await stranger(server))
    ).status_code == 404
    url = (await server.client.get(f"/sessions/{session_id}/trace_export")).json()["url"]
    path = urlsplit(url).path.removeprefix("/api/v1")
    server.handle.down = "away"
    assert (await server.client.get(path)).json()["traceEvents"] == []
    server.time.pass_seconds(3601)
    assert (await server.client.get(path)).status_code == 404
    assert (await server.client.get(path[:-3])).status_code == 404


@one_server
async def test_a_sampler_that_only_samples_counts_and_is_in_traces(server: TestedServer, hour: datetime) -> None:
    replica = FakeReplica("replica", "other-1")
    await server.fleet.add_replica(replica)
    sampler = await server.sampler()
    replica.fake.used = [used(sampler, worker_pb2.SAMPLED_TOKENS, 5, hour)]
    replica.fake.spans = [span(sampler, 0, "sample", 10.0, 0.0, 12.0, request_id=f"{sampler}:asample:1@5f3a90c1")]
    await server.services.background.collect_now()
    [event] = (await usage(server, hour))["data"]
    assert (event["base_model"], event["event_info"]["token_count"]) == (OTHER_MODEL, 5)

    url = (await server.client.get(f"/sessions/{sampler.split(':')[0]}/trace_export")).json()["url"]
    [named, whole] = (await server.client.get(urlsplit(url).path.removeprefix("/api/v1"))).json()["traceEvents"]
    assert named["args"] == {"name": f"{sampler} on {OTHER_MODEL}"}
    assert (whole["name"], whole["cat"], whole["dur"]) == ("sample", "sampling", 2_000_000)


@one_server
async def test_numbers_that_the_store_did_not_take_are_kept_and_no_more_are_taken(
    server: TestedServer, hour: datetime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.model()

    async def is_away(*_: object) -> None:
        raise StoreUnavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_usage", is_away)
        for amount in (1, 2):
            server.worker.used = [used("s:train:0", worker_pb2.TRAINING_TOKENS, amount, hour)]
            with pytest.raises(StoreUnavailable):
                await server.services.background.collect_now()
    assert [one.amount for one in server.worker.used] == [2]
    await server.services.background.collect_now()
    assert [event["event_info"]["token_count"] for event in (await usage(server, hour))["data"]] == [3]


async def test_a_stopping_server_collects_the_usage_of_workers(
    tmp_path: Path, fleet: FakeFleet, hour: datetime
) -> None:
    async with running_server(settings_for(tmp_path), fleet) as server:
        await server.model()
        await server.services.background.collect_now()
        server.worker.used = [used("s:train:0", worker_pb2.TRAINING_TOKENS, 7, hour)]
    async with running_server(settings_for(tmp_path), fleet) as server:
        assert [event["event_info"]["token_count"] for event in (await usage(server, hour))["data"]] == [7]
