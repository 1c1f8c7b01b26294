"""The traps of the protocol that bind a server, by their numbers in the protocol notes."""

from __future__ import annotations

import asyncio
import gzip
import time
from pathlib import Path

import pytest
import zstandard
from pydantic import ValidationError
from support.server.fake_fleet import FakeFleet
from support.server.http_server import (
    API_KEY,
    PROTOBUF,
    TestedServer,
    one_server,
    running_server,
    settings_for,
    training_body,
)
from tinsmith_rpc import RELEASE_SEQ_ID, wire_pb2, worker_pb2
from tinsmith_server.settings import Settings
from tinsmith_server.store.connection import StoreUnavailable

pytestmark = pytest.mark.core

MIB = 2**20


async def test_trap_01_a_pending_poll_is_held_until_the_result_exists(server: TestedServer) -> None:
    model_id = await server.model()
    server.worker.withheld.add((model_id, 1))
    submitted = await server.forward_backward(model_id, 1)
    poll = asyncio.create_task(server.result(submitted.json()["request_id"]))
    await server.worker.awaited()
    assert not poll.done()
    await server.worker.finish((model_id, 1))
    assert (await poll).status_code == 200


@pytest.mark.core("durability 10")
async def test_trap_01_an_unreachable_worker_is_a_408_with_a_reason_after_the_full_hold(
    hasty_server: TestedServer,
) -> None:
    model_id = await hasty_server.model()
    hasty_server.handle.down = "the worker is restarting"
    asked_at = time.monotonic()
    response = await hasty_server.result(f"{model_id}:op:0")
    assert (response.status_code, response.json()) == (
        408,
        {"queue_state": "paused_capacity", "queue_state_reason": "the worker is restarting"},
    )
    assert time.monotonic() - asked_at >= 0.1


async def test_trap_01_an_error_inside_the_server_never_becomes_a_5xx_of_a_poll(
    hasty_server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await hasty_server.model()

    async def broken(*_args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(hasty_server.services.keys, "caller", broken)
    response = await hasty_server.result(f"{model_id}:op:0")
    assert response.status_code == 408


async def test_trap_01_an_unavailable_store_is_a_408_with_the_reason(
    hasty_server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = await hasty_server.model()

    async def unavailable(*_args: object) -> None:
        raise StoreUnavailable("The store is not available: it has not answered for 20 s")

    monkeypatch.setattr(hasty_server.services.keys, "caller", unavailable)
    response = await hasty_server.result(f"{model_id}:op:0")
    assert response.status_code == 408
    assert response.json()["queue_state_reason"] == "The store is not available: it has not answered for 20 s"
    assert response.headers["x-deprecation-note"].startswith("waiting: The store is not available")


async def test_trap_02_chunks_are_acknowledged_in_any_order(server: TestedServer) -> None:
    model_id = await server.model()
    for seq_id in (2, 3, 4, 1):
        response = await server.forward_backward(model_id, seq_id)
        assert response.json()["request_id"] == f"{model_id}:op:{seq_id}"


async def test_trap_03_samples_have_sequence_ids_and_a_protobuf_result(server: TestedServer) -> None:
    sampler = await server.sampler()
    submitted = (await server.sample(sampler, 7, num_samples=3)).json()
    assert submitted["sample_sequence_ids"] == [f"{sampler}:asample:7:{index}" for index in range(3)]
    result = await server.result(submitted["request_id"])
    assert result.headers["content-type"] == "application/x-protobuf"
    assert len(wire_pb2.SampleResponse.FromString(result.content).sequences) == 3


@one_server
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/create_session"), ("GET", "/training_runs/none"), ("GET", "/nowhere"), ("POST", "/create_custom_loss")],
)
async def test_trap_04_errors_have_a_content_length_and_no_encoding(
    server: TestedServer, method: str, path: str
) -> None:
    response = await server.client.request(method, path, content=b"]")
    assert response.status_code >= 400
    assert int(response.headers["content-length"]) == len(response.content)
    assert "content-encoding" not in response.headers


async def test_trap_05_a_malformed_chunk_is_acknowledged_and_handed_to_the_worker(server: TestedServer) -> None:
    model_id = await server.model()
    body = training_body(model_id, 1)[:-3]
    response = await server.client.post("/forward_backward", content=body, headers=PROTOBUF)
    assert response.status_code == 200
    assert server.worker.payload(model_id, 1) == body


async def test_trap_05_a_field_of_impossible_length_is_a_sentence_and_never_a_500(server: TestedServer) -> None:
    """A field behind the IDs makes a malformed chunk like any other; before them the model is unknown."""
    model_id = await server.model()
    field_of_2_to_63_bytes = b"\x3a" + b"\x80" * 9 + b"\x01"
    body = training_body(model_id, 1) + field_of_2_to_63_bytes
    behind = await server.client.post("/forward_backward", content=body, headers=PROTOBUF)
    assert (behind.status_code, server.worker.payload(model_id, 1)) == (200, body)
    before = await server.client.post("/forward_backward", content=field_of_2_to_63_bytes + body, headers=PROTOBUF)
    assert before.status_code == 422
    assert f"a field of {2**63} bytes" in before.json()["detail"]


@pytest.mark.parametrize("encoding", ["identity", "zstd", "gzip"])
async def test_trap_05_an_oversize_chunk_is_acknowledged_and_its_future_fails(
    tmp_path: Path, fleet: FakeFleet, encoding: str
) -> None:
    async with running_server(settings_for(tmp_path, max_body_bytes=MIB), fleet) as server:
        model_id = await server.model()
        body = compressed(training_body(model_id, 1) + b"\x3a\x80\x80\x80\x01" + bytes(2 * MIB), encoding)
        headers = {**PROTOBUF, "content-encoding": encoding}
        failed = await server.outcome(await server.client.post("/forward_backward", content=body, headers=headers))
        assert failed["category"] == "user"
        assert "limit of 1048576 bytes" in failed["error"]


async def test_trap_07_an_operation_behind_a_gap_reports_the_gap(hasty_server: TestedServer) -> None:
    model_id = await hasty_server.model()
    reason = "waiting for operation 1, which has not arrived yet"
    pending = worker_pb2.AwaitReply(pending=worker_pb2.Pending(reason=reason))
    await hasty_server.forward_backward(model_id, 2)
    hasty_server.worker.outcomes[model_id, 2] = pending
    assert (await hasty_server.result(f"{model_id}:op:2")).json() == {
        "queue_state": "active",
        "queue_state_reason": reason,
    }


@pytest.mark.parametrize(
    "body",
    [{"adam_params": {"learning_rate": None}}, {"adam_params": 3}, {"optimizer_params": {"type": "dimuon"}}],
    ids=["nan", "no-params", "dimuon"],
)
async def test_trap_05_a_bad_optim_step_takes_its_place_and_fails_there(
    server: TestedServer, body: dict[str, object]
) -> None:
    model_id = await server.model()
    failed = await server.outcome(await server.post("/optim_step", {"model_id": model_id, "seq_id": 1, **body}))
    assert failed["category"] == "user"
    assert server.worker.operations[model_id, 1].kind == worker_pb2.OPTIM_STEP


async def test_trap_06_a_repeated_submit_has_the_same_id_and_runs_once(server: TestedServer) -> None:
    model_id = await server.model()
    answers = [await server.forward_backward(model_id, 1), await server.forward_backward(model_id, 1)]
    assert [answer.json()["request_id"] for answer in answers] == [f"{model_id}:op:1"] * 2
    assert list(server.worker.operations) == [(model_id, 0), (model_id, 1)]


async def test_trap_06_two_copies_at_the_same_moment_make_one_model(server: TestedServer) -> None:
    session_id = await server.session()
    answers = await asyncio.gather(*(server.create_model(session_id) for _ in range(8)))
    assert {answer.json()["request_id"] for answer in answers} == {f"{session_id}:train:0:op:0"}
    await server.result(f"{session_id}:train:0:op:0")
    assert list(server.worker.operations) == [(f"{session_id}:train:0", 0)]


async def test_trap_06_a_repeated_ephemeral_save_opens_the_session_of_the_first(server: TestedServer) -> None:
    model_id = await server.model()
    for number in range(3):
        body = {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": number, "kind": "snapshot"}
        opened = await server.outcome(await server.post("/save_weights_for_sampler", body))
        assert opened["sampling_session_id"].endswith(":sample:0")


@pytest.mark.core("POST /api/v1/create_session")
async def test_trap_06_a_repeated_create_session_is_known_by_its_idempotency_key(server: TestedServer) -> None:
    headers = {"x-idempotency-key": "stainless-python-retry-1"}
    first = await server.session(headers=headers)
    assert await server.session(headers=headers) == first
    assert await server.session() != first


@pytest.mark.core("POST /api/v1/forward_backward", "POST /api/v1/retrieve_future")
async def test_trap_08_a_result_can_be_read_any_number_of_times(server: TestedServer) -> None:
    model_id = await server.model()
    await server.forward_backward(model_id, 1)
    results = [(await server.result(f"{model_id}:op:1")).content for _ in range(3)]
    assert results[0]
    assert results == results[:1] * 3


async def test_trap_09_futures_survive_a_restart_of_the_server(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path), fleet) as server:
        model_id = await server.model()
        await server.forward_backward(model_id, 1)
    async with running_server(settings_for(tmp_path), fleet) as server:
        assert (await server.result(f"{model_id}:op:1")).status_code == 200


async def test_trap_09_a_model_acknowledged_before_a_crash_is_created_after_it(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    fleet.handles["tiny-1"].down = "not started yet"
    async with running_server(settings_for(tmp_path), fleet) as server:
        made = (await server.create_model(await server.session())).json()
    fleet.handles["tiny-1"].down = None
    async with running_server(settings_for(tmp_path), fleet) as server:
        assert (await server.result(made["request_id"])).json()["model_id"] == made["model_id"]


async def test_trap_14_sequence_numbers_of_clones_need_64_bits(server: TestedServer) -> None:
    sampler = await server.sampler()
    for seq_id in (246381329000000000, 2**63 - 1):
        submitted = (await server.sample(sampler, seq_id)).json()
        assert submitted["request_id"].startswith(f"{sampler}:asample:{seq_id}@")
        assert (await server.result(submitted["request_id"])).status_code == 200


async def test_trap_15_a_model_made_by_loading_has_the_id_that_the_client_computes(server: TestedServer) -> None:
    path = (await server.outcome(await server.save(await server.model(), 1, "ck")))["path"]
    session_id = await server.session()
    body = {"session_id": session_id, "model_seq_id": 5, "path": path, "optimizer": True}
    await server.outcome(await server.post("/load_weights", body))
    info = (await server.post("/get_info", {"model_id": f"{session_id}:train:5"})).json()
    assert (info["model_id"], info["lora_rank"]) == (f"{session_id}:train:5", 8)


async def test_trap_16_run_ids_hold_colons_and_checkpoint_ids_a_slash(server: TestedServer) -> None:
    model_id = await server.model()
    await server.outcome(await server.save(model_id, 1, "a.b-c"))
    assert ":" in model_id
    response = await server.client.post(f"/training_runs/{model_id}/checkpoints/weights/a.b-c/publish")
    assert response.status_code == 200


@one_server
@pytest.mark.parametrize("body", [b"", b"no json", b'{"events": 3}', b'{"events": [null, {"event": 1}]}', b"[]"])
@pytest.mark.core("POST /api/v1/telemetry")
async def test_trap_17_telemetry_is_always_accepted(server: TestedServer, body: bytes) -> None:
    response = await server.client.post("/telemetry", content=body, headers={"X-API-Key": "tml-unknown"})
    assert (response.status_code, response.json()) == (200, {"status": "accepted"})


@pytest.mark.core("POST /api/v1/session_heartbeat")
async def test_trap_18_a_heartbeat_is_refused_only_when_the_session_is_over(server: TestedServer) -> None:
    session_id = await server.session()
    beat = {"session_id": session_id, "type": "session_heartbeat"}
    assert (await server.post("/session_heartbeat", beat)).json() == {}
    server.time.pass_seconds(600)
    assert (await server.post("/session_heartbeat", beat)).status_code == 200
    await server.post(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    assert (await server.post("/session_heartbeat", beat)).status_code == 410


@pytest.mark.core("durability 12")
async def test_trap_19_a_client_that_vanishes_gets_its_model_saved_and_released(
    tmp_path: Path, fleet: FakeFleet
) -> None:
    async with running_server(settings_for(tmp_path, session_timeout_seconds=30, poll_hold_seconds=5), fleet) as server:
        model_id = await server.model()
        server.time.pass_seconds(31)
        await server.services.background.reap_now()
        listed = (await server.client.get(f"/training_runs/{model_id}/checkpoints")).json()["checkpoints"]
        assert [one["checkpoint_id"] for one in listed] == ["weights/autosave"]
        assert (model_id, RELEASE_SEQ_ID) in server.worker.operations
        assert (await server.forward_backward(model_id, 1)).status_code == 410


async def test_trap_21_too_many_samples_are_pushed_back_with_429(server: TestedServer) -> None:
    sampler = await server.sampler()
    server.worker.sampler_full = True
    assert (await server.sample(sampler)).status_code == 429
    server.worker.sampler_full = False
    assert (await server.sample(sampler)).status_code == 200


async def test_trap_21_a_full_disk_refuses_training_before_it_is_acknowledged_but_never_with_429(
    server: TestedServer,
) -> None:
    model_id = await server.model()
    server.worker.disk_full = True
    refused = await server.forward_backward(model_id, 1)
    assert refused.status_code == 507
    assert (model_id, 1) not in server.worker.operations
    # The SDK repeats it for five minutes either way: with these its user hears at once why nothing happens.
    assert refused.headers["x-deprecation-note"] == "waiting: the journal's disk is full"
    assert refused.headers["x-should-retry"] == "false"


async def test_trap_21_a_waiter_for_a_model_on_a_full_disk_gets_the_reason(hasty_server: TestedServer) -> None:
    """The SDK keeps the reason of a poll to itself for a quarter of an hour."""
    hasty_server.worker.disk_full = True
    made = await hasty_server.create_model(await hasty_server.session())
    pending = await hasty_server.result(made.json()["request_id"])
    while pending.json()["queue_state_reason"] is None:  # each is held, and the worker is asked meanwhile
        pending = await hasty_server.result(made.json()["request_id"])
    assert pending.status_code == 408
    assert pending.json()["queue_state_reason"] == "the journal's disk is full"
    assert pending.headers["x-deprecation-note"] == "waiting: the journal's disk is full"


async def test_trap_22_a_sample_that_a_crash_forgot_is_gone_and_not_unknown(server: TestedServer) -> None:
    submitted = (await server.sample(await server.sampler())).json()
    server.worker.lose_memory()
    assert (await server.result(submitted["request_id"])).status_code == 410


async def test_trap_23_a_conflict_is_not_a_409(server: TestedServer) -> None:
    model_id = await server.model()
    await server.outcome(await server.save(model_id, 1, "ck"))
    publish = f"/training_runs/{model_id}/checkpoints/weights/ck/publish"
    statuses = [(await server.client.post(publish)).status_code for _ in range(2)]
    assert statuses == [200, 422]


@pytest.mark.parametrize("key", ["sk-test", "", "TML-x"])
def test_trap_28_a_static_key_that_the_sdk_would_refuse_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(ValidationError, match="tml-"):
        Settings(api_key=key)  # type: ignore[arg-type]


async def test_trap_28_made_keys_start_with_the_prefix(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, api_key=None), fleet) as server:
        secret = server.app.state.first_key.secret
        assert secret.startswith("tml-")
        assert (await server.post("/client/config", headers={"X-API-Key": secret})).status_code == 200
        assert (await server.post("/client/config", headers={"X-API-Key": API_KEY})).status_code == 401


def compressed(body: bytes, encoding: str) -> bytes:
    match encoding:
        case "zstd":
            return zstandard.compress(body)
        case "gzip":
            return gzip.compress(body)
    return body
