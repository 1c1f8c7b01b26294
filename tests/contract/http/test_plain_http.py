"""Programs without an SDK: no sessions, no numbers, no protobuf; the same services behind the same doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import BASE_MODEL, OTHER_MODEL, FakeFleet
from support.server.http_server import TestedServer, one_server, running_servers, settings_for
from tinsmith_rpc import PLAIN_SEQ_IDS, worker_pb2
from tinsmith_server.services.accounts.sessions import ACTIVE_SECONDS

pytestmark = pytest.mark.core

DATUM = {
    "model_input": {"chunks": [{"tokens": [1, 2]}]},
    "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}},
}


def training(model_id: str, **fields: Any) -> dict[str, Any]:
    return {
        "model_id": model_id,
        "forward_backward_input": {"data": [DATUM], "loss_fn": "cross_entropy"},
        "forward_input": {"data": [DATUM], "loss_fn": "cross_entropy"},
        **fields,
    }


def key(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Idempotency-Key": name}}


async def a_model(server: TestedServer, **options: Any) -> str:
    """Made without a session."""
    made = await server.post("/create_model", {"base_model": BASE_MODEL, "lora_config": {"rank": 4}}, **options)
    while (answer := await server.result(made.json()["request_id"])).status_code == 408:
        pass  # a server that holds polls for a moment only
    assert answer.status_code == 200
    return str(made.json()["model_id"])


def number(submitted: httpx.Response) -> int:
    assert submitted.status_code == 200, submitted.text
    return int(submitted.json()["request_id"].rpartition(":")[2])


# ---- numbers


async def test_operations_without_a_number_are_numbered_in_the_order_of_arrival(server: TestedServer) -> None:
    model_id = await a_model(server)
    calls = [
        ("/forward_backward", training(model_id)),
        ("/forward", training(model_id)),
        ("/optim_step", {"model_id": model_id, "adam_params": {"learning_rate": 0.1}}),
        ("/save_weights", {"model_id": model_id, "path": "ck"}),
        ("/save_weights_for_sampler", {"model_id": model_id, "path": "sampler"}),
        ("/save_weights_external", {"model_id": model_id, "path": "export"}),
        ("/load_weights", {"model_id": model_id, "path": f"tinker://{model_id}/weights/ck", "seq_id": None}),
    ]
    for expected, (path, body) in enumerate(calls, start=PLAIN_SEQ_IDS + 1):
        submitted = await server.post(path, body)
        assert number(submitted) == expected
        assert "error" not in (await server.client.get(f"/retrieve_future/{submitted.json()['request_id']}")).json()


@pytest.mark.core("POST /api/v1/optim_step")
async def test_a_repeat_with_the_same_key_is_the_same_operation(server: TestedServer) -> None:
    model_id = await a_model(server)
    body = training(model_id)
    answers = await asyncio.gather(*(server.post("/forward_backward", body, **key("a")) for _ in range(6)))
    assert {number(answer) for answer in answers} == {PLAIN_SEQ_IDS + 1}
    assert number(await server.post("/forward_backward", body, **key("b"))) == PLAIN_SEQ_IDS + 2
    assert number(await server.post("/optim_step", {"model_id": model_id}, **key("a"))) == PLAIN_SEQ_IDS + 3
    old_header = {"headers": {"X-Idempotency-Key": "a"}}
    assert number(await server.post("/forward_backward", body, **old_header)) == PLAIN_SEQ_IDS + 1


SESSION = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
KEYED = {
    "/create_session": (SESSION, {**SESSION, "tags": ["b"]}),
    "/create_model": ({"base_model": BASE_MODEL}, {"base_model": BASE_MODEL, "lora_config": {"rank": 8}}),
    "/create_sampling_client": ({"base_model": BASE_MODEL}, {"base_model": OTHER_MODEL}),
    "/sample": ({"base_model": BASE_MODEL, "prompt": [1]}, {"base_model": BASE_MODEL, "prompt": [2]}),
}


@pytest.mark.parametrize("path", KEYED)
async def test_a_key_that_returns_with_another_request_is_refused(server: TestedServer, path: str) -> None:
    """Otherwise its sender would take the result of an earlier request for the result of this one."""
    body, other = KEYED[path]
    first = (await server.post(path, body, **key("a"))).json()
    refused = await server.post(path, other, **key("a"))
    assert (refused.status_code, "'a' was used for another request" in refused.json()["detail"]) == (422, True)
    reordered = dict(reversed(body.items()))
    assert (await server.post(path, reordered, **key("a"))).json() == first
    assert (await server.post(path, other, **key("b"))).status_code == 200


async def test_each_call_without_a_key_is_a_separate_operation(server: TestedServer) -> None:
    model_id = await a_model(server)
    assert [number(await server.post("/optim_step", {"model_id": model_id})) for _ in range(3)] == [
        PLAIN_SEQ_IDS + place for place in (1, 2, 3)
    ]


async def test_a_key_outlives_the_worker_and_the_server(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_servers(settings_for(tmp_path), fleet) as (first, _):
        model_id = await a_model(first)
        assert number(await first.post("/optim_step", {"model_id": model_id}, **key("a"))) == PLAIN_SEQ_IDS + 1
    fleet.handles["tiny-1"].fake.lose_memory()
    async with running_servers(settings_for(tmp_path), fleet) as (_, second):
        assert number(await second.post("/optim_step", {"model_id": model_id}, **key("a"))) == PLAIN_SEQ_IDS + 1
        assert number(await second.post("/optim_step", {"model_id": model_id}, **key("b"))) == PLAIN_SEQ_IDS + 2


async def test_plain_calls_and_numbered_calls_take_turns_on_one_model(server: TestedServer) -> None:
    model_id = await server.model()
    for seq_id in (1, 2):
        assert number(await server.forward_backward(model_id, seq_id)) == seq_id
        step = await server.post("/optim_step", {"model_id": model_id}, **key(f"{seq_id}"))
        assert number(step) == PLAIN_SEQ_IDS + seq_id
        assert (await server.client.get(f"/retrieve_future/{step.json()['request_id']}")).status_code == 200


@one_server
@pytest.mark.parametrize("seq_id", [0, -1, "1", 1.5, True, 2**62])
async def test_a_value_that_is_not_a_number_is_refused(server: TestedServer, seq_id: object) -> None:
    model_id = await server.model()
    for path, body in {"/optim_step": {"model_id": model_id}, "/forward_backward": training(model_id)}.items():
        refused = await server.post(path, {**body, "seq_id": seq_id})
        assert (refused.status_code, "seq_id" in refused.json()["detail"]) == (422, True)


# ---- models without a session


async def test_a_model_without_a_session_is_made_once_for_a_key(server: TestedServer) -> None:
    made = [await a_model(server, **key("m")) for _ in range(3)]
    assert len(set(made)) == 1
    assert await a_model(server) not in made


@pytest.fixture
async def servers(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[tuple[TestedServer, TestedServer]]:
    async with running_servers(settings_for(tmp_path, poll_hold_seconds=0.1), fleet) as servers:
        yield servers


async def test_calls_are_the_signs_of_life_of_a_model_without_a_session(
    servers: tuple[TestedServer, TestedServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = servers[0]
    monkeypatch.setattr("tinsmith_server.services.accounts.sessions.SIGN_OF_LIFE_SECONDS", 0)
    model_id = await a_model(server)
    server.worker.withheld.add((model_id, PLAIN_SEQ_IDS + 1))
    submitted = await server.post("/optim_step", {"model_id": model_id})
    for _ in range(3):
        server.time.pass_seconds(600)
        server.services.sessions._recent_calls.forget(model_id.partition(":")[0])
        assert (await server.client.get(f"/retrieve_future/{submitted.json()['request_id']}")).status_code == 408
        session = await server.services.sessions.owned("default", model_id.partition(":")[0])
        assert session.last_heartbeat_at == server.time.now


@one_server
@pytest.mark.parametrize("path", ["/sample", "/create_sampling_client"])
async def test_a_refused_request_leaves_no_session(server: TestedServer, path: str) -> None:
    for source in ({"base_model": "unknown/model"}, {"model_path": "tinker://no:train:0/sampler_weights/one"}):
        assert (await server.post(path, {"prompt": [1], **source})).status_code in {404, 422}
    assert await server.services.sessions.list_ids("default", 10, 0) == []


@one_server
async def test_one_poll_for_many_samples_is_a_sign_of_life_of_a_sampling_client(server: TestedServer) -> None:
    """A client that waits for a long sample sends no other request meanwhile."""
    made = (await server.post("/create_sampling_client", {"base_model": BASE_MODEL})).json()
    server.time.pass_seconds(600)
    server.services.sessions._recent_calls.forget(made["sampling_session_id"].partition(":")[0])
    target = {"type": "sampling_session", "sampling_session_id": made["sampling_session_id"]}
    assert (await server.post("/retrieve_futures", {"target": target, "timeout": 0})).status_code == 200
    session = await server.services.sessions.owned("default", made["sampling_session_id"].partition(":")[0])
    assert session.last_heartbeat_at == server.time.now


@one_server
async def test_own_sessions_of_samples_are_forgotten_a_day_after_their_end_and_those_of_models_stay(
    server: TestedServer,
) -> None:
    model_id = await a_model(server)
    keyed = {"Idempotency-Key": "one"}
    sample = await server.post("/sample", {"prompt": [1], "base_model": BASE_MODEL}, headers=keyed)
    await server.post("/create_sampling_client", {"base_model": BASE_MODEL})
    of_model, of_program = model_id.partition(":")[0], await server.session()

    async def listed_after(seconds: float) -> set[str]:
        server.time.pass_seconds(seconds)
        await server.services.background.reap_now()
        await server.services.background.sweep_now()
        return set((await server.client.get("/sessions")).json()["sessions"])

    assert len(await listed_after(0)) == 4
    await listed_after(10)  # hears clients without a gap from here on
    for _ in range(40):
        await listed_after(30)
    assert len(await listed_after(24 * 3600 - 600)) == 4
    assert await listed_after(900) == {of_model, of_program}
    again = await server.post("/sample", {"prompt": [1], "base_model": BASE_MODEL}, headers=keyed)
    assert again.json()["sampling_session_id"] != sample.json()["sampling_session_id"]


@pytest.mark.core("POST /api/v1/delete_model")
async def test_a_deleted_model_is_over_and_so_is_its_own_session(server: TestedServer) -> None:
    model_id = await a_model(server)
    deleted = await server.post("/delete_model", {"model_id": model_id})
    assert deleted.json() == {"model_id": model_id, "status": "deleted"}
    assert (await server.services.models.owned("default", model_id)).state == "released"
    session = await server.services.sessions.owned("default", model_id.partition(":")[0])
    assert session.finish_type == "success"
    assert (await server.post("/optim_step", {"model_id": model_id})).status_code == 410


async def test_a_session_that_a_client_asked_for_outlives_its_deleted_model(server: TestedServer) -> None:
    model_id = await server.model()
    await server.post("/delete_model", {"model_id": model_id})
    session = await server.services.sessions.owned("default", model_id.partition(":")[0])
    assert session.finished_at is None


# ---- results


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("GET", marks=pytest.mark.core("GET /api/v1/retrieve_future/{request_id}")),
        pytest.param("POST", marks=pytest.mark.core("POST /api/v1/retrieve_future/{request_id}")),
    ],
)
async def test_a_result_by_its_address_is_json_unless_protobuf_is_named(server: TestedServer, method: str) -> None:
    model_id = await a_model(server)
    request_id = (await server.post("/forward_backward", training(model_id))).json()["request_id"]
    answer = await server.client.request(method, f"/retrieve_future/{request_id}")
    assert answer.headers["content-type"] == "application/json"
    assert "loss_fn_outputs" in answer.json()
    named = {"accept": "application/x-protobuf"}
    answer = await server.client.request(method, f"/retrieve_future/{request_id}", headers=named)
    assert answer.headers["content-type"] == "application/x-protobuf"


@pytest.mark.parametrize("request_id", ["nonsense", "sess-1:train:0:op:1", "a:asample:1@00000000"])
async def test_a_result_that_is_not_there_is_a_404(server: TestedServer, request_id: str) -> None:
    assert (await server.client.get(f"/retrieve_future/{request_id}")).status_code == 404


# ---- samples


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": [1, 2, 3]},
        {"prompt": {"tokens": [1, 2, 3]}},
        {"prompt": {"input_ids": [1, 2, 3]}},
        {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}},
        {"prompts": [[1, 2, 3]]},
    ],
)
async def test_a_sample_without_a_session_or_a_number(server: TestedServer, prompt: dict[str, Any]) -> None:
    params = {"max_tokens": 4, "stop_token_ids": [7]}
    body = {"base_model": BASE_MODEL, "num_samples": 2, "sampling_params": params, **prompt}
    submitted = await server.post("/sample", body)
    request_id = submitted.json()["request_id"]
    asked = server.worker.samples[request_id]
    assert memoryview(asked.prompt_tokens).cast("i").tolist() == [1, 2, 3]
    assert (asked.max_tokens, list(asked.stop_tokens), asked.num_samples) == (4, [7], 2)
    answer = (await server.client.get(f"/retrieve_future/{request_id}")).json()
    assert len(answer["sequences"]) == len(submitted.json()["sample_sequence_ids"]) == 2


async def test_samples_of_one_source_share_a_sampling_session_and_are_samples_of_their_own(
    server: TestedServer,
) -> None:
    """Each server opens one, and another one when that has ended."""
    body = {"base_model": BASE_MODEL, "prompt": [1, 2, 3]}
    samples = [(await server.post("/sample", body)).json() for _ in range(6)]
    opened = {sample["sampling_session_id"] for sample in samples}
    assert len(opened) <= 2
    assert len({sample["request_id"] for sample in samples}) == 6
    for sampling_session_id in opened:
        session_id = sampling_session_id.partition(":")[0]
        await server.post(f"/sessions/{session_id}/finish", {"reason": {"type": "success"}})
    # A server that did not end it may use an ended one for ACTIVE_SECONDS.
    async with asyncio.timeout(10):
        while not opened.isdisjoint([(await server.post("/sample", body)).json()["sampling_session_id"] for _ in "12"]):
            await asyncio.sleep(ACTIVE_SECONDS / 4)


@pytest.mark.parametrize("path", ["/sample", "/asample"])
async def test_a_sample_of_live_weights_is_of_a_save_behind_all_accepted_operations(
    server: TestedServer, path: str
) -> None:
    model_id = await server.model()
    await server.forward_backward(model_id, 1)
    body = {"model_path": f"tinker://{model_id}/weights/live", "prompt": {"tokens": [1, 2, 3]}}
    ids = [(await server.post(path, body, **key("s"))).json()["request_id"] for _ in "12"]
    assert len(set(ids)) == 1
    saves = [submit for submit in server.worker.submits if submit.kind == worker_pb2.SAVE_WEIGHTS]
    assert {submit.seq_id for submit in saves} == {PLAIN_SEQ_IDS + 1}
    assert server.worker.samples[ids[0]].adapter.directory == server.worker.events[-1].checkpoint_saved.directory
    assert (await server.client.get(f"/retrieve_future/{ids[0]}")).status_code == 200


async def test_a_client_of_live_weights_keeps_the_weights_of_that_moment(server: TestedServer) -> None:
    model_id = await server.model()
    body = {"model_path": f"tinker://{model_id}/weights/live"}
    first, second = [(await server.post("/create_sampling_client", body)).json() for _ in "12"]
    assert first["sampling_session_id"] != second["sampling_session_id"]
    of_sdk = {**body, "session_id": model_id.partition(":")[0], "sampling_session_seq_id": 7}
    opened = [(await server.post("/create_sampling_session", of_sdk)).json() for _ in "12"]
    assert opened[0] == opened[1]
    assert len(server.worker.events) == 3
    refused = await server.post("/create_sampling_client", {"model_path": "tinker://unknown/weights/live"})
    assert refused.status_code == 404


@pytest.mark.core("POST /api/v1/create_sampling_client", "POST /api/v1/sample")
async def test_samples_of_one_sampling_client_are_apart_unless_their_key_is_one(server: TestedServer) -> None:
    client = (await server.post("/create_sampling_client", {"base_model": BASE_MODEL})).json()
    assert client["sampling_client_id"] == client["sampling_session_id"]
    body = {"sampling_session_id": client["sampling_session_id"], "prompt": [1, 2, 3]}
    ids = [(await server.post("/sample", body)).json()["request_id"] for _ in range(3)]
    ids += [(await server.post("/sample", body, **key("s"))).json()["request_id"] for _ in range(3)]
    assert len(set(ids)) == 4


@one_server
@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1]},
        {"base_model": 1, "prompt": [1]},
        {"base_model": BASE_MODEL},
        {"base_model": BASE_MODEL, "prompt": "text"},
        {"base_model": BASE_MODEL, "prompts": [[1], [2]]},
        {"base_model": BASE_MODEL, "prompt": [1], "prompts": [[1]]},
        {"base_model": BASE_MODEL, "prompt": [1], "sampling_params": {"stop": ["a"], "stop_token_ids": [1]}},
        {"base_model": "org/nothing", "prompt": [1]},
    ],
)
async def test_a_sample_without_a_known_form_is_refused(server: TestedServer, body: dict[str, Any]) -> None:
    refused = await server.post("/sample", body)
    assert (refused.status_code, bool(refused.json()["detail"])) == (422, True)


# ---- what else there is to ask


@one_server
@pytest.mark.core("GET /api/v1/get_tokenizer")
async def test_the_capabilities_name_the_tokenizers_of_the_workers(server: TestedServer) -> None:
    model_id = await a_model(server)
    answer = (await server.client.get("/get_tokenizer", params={"model_id": model_id})).json()
    assert (answer["tokenizer_id"], answer["tokenizer_type"]) == (BASE_MODEL, "HuggingFace")
    assert (await server.client.get("/get_tokenizer", params={"model_id": "sess-1:train:0"})).status_code == 404


@one_server
@pytest.mark.core("GET /health", "GET /api/v1/health")
async def test_health_needs_no_key(server: TestedServer) -> None:
    for path in ("/health", "/api/v1/health"):
        answer = await server.client.get(f"http://server{path}", headers={"X-API-Key": ""})
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.core("POST /api/v1/forward")
async def test_a_plain_forward_asks_for_no_gradients(server: TestedServer) -> None:
    model_id = await a_model(server)
    await server.post("/forward", training(model_id))
    assert server.worker.operations[model_id, PLAIN_SEQ_IDS + 1].kind == worker_pb2.FORWARD_BACKWARD
