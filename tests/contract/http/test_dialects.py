"""Requests of other makers' clients: who may ask for what, what it becomes, and what goes wrong in which form."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import BASE_MODEL, FakeFleet
from support.server.fake_worker import END_TOKEN
from support.server.http_server import API_KEY, TestedServer, running_server, settings_for
from tinsmith_rpc import worker_pb2
from tinsmith_server.services.polling import texts

pytestmark = pytest.mark.core

HELLO = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/oai/api/v1/chat/completions", "/oai/api/v1/completions"
MESSAGES, COUNT = "/anthropic/api/v1/messages", "/anthropic/api/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HELLO},
    COMPLETIONS: {"prompt": "Hello"},
    MESSAGES: {"messages": HELLO, "max_tokens": 8},
}
SHORT = {path: path.removeprefix("/oai/api").removeprefix("/anthropic/api") for path in BODIES}
# A short path keeps every promise of the path that it stands for.
BODIES |= {SHORT[path]: body for path, body in BODIES.items()}
BEARER = {"X-API-Key": "", "Authorization": f"Bearer {API_KEY}"}


@pytest.fixture
async def server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    """One: a request is answered where it comes, and leaves nothing behind."""
    async with running_server(settings_for(tmp_path), fleet) as server:
        yield server


async def send_request(
    server: TestedServer, path: str, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    body = {"model": BASE_MODEL, **BODIES.get(path, {}), **fields}
    return await server.client.post(f"http://server{path}", json=body, headers=headers)


def message_of(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    return message


async def saved_sampler(server: TestedServer) -> str:
    body = {"model_id": await server.model(), "seq_id": 1, "path": "mine"}
    path: str = (await server.outcome(await server.post("/save_weights_for_sampler", body)))["path"]
    return path


async def other_tenant(server: TestedServer) -> dict[str, str]:
    made = await server.services.keys.create("other", "theirs")
    return {"X-API-Key": made.secret}


@pytest.mark.core("POST /anthropic/api/v1/messages")
async def test_either_header_carries_the_key_and_a_wrong_key_gets_an_error_of_the_dialect(
    server: TestedServer,
) -> None:
    for path in BODIES:
        assert (await send_request(server, path)).status_code == 200
        assert (await send_request(server, path, headers=BEARER)).status_code == 200
        refused = await send_request(server, path, headers={"X-API-Key": "", "Authorization": "Bearer tml-wrong"})
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"


@pytest.mark.core("POST /oai/api/v1/chat/completions")
async def test_a_sample_goes_to_the_sampler_as_tinkers_own_does_but_is_read_as_text(server: TestedServer) -> None:
    stop = {"stop": ["x", "y"], "n": 2, "seed": -1, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "max_tokens": 4}
    answer = (await send_request(server, CHAT, **stop, logprobs=True, top_logprobs=3)).json()
    (request,) = server.worker.samples.values()
    assert (request.num_samples, request.seed, request.top_k, request.max_tokens) == (2, 2**64 - 1, 5, 4)
    assert (list(request.stop_strings), list(request.stop_tokens)) == (["x", "y"], [END_TOKEN])
    assert (request.topk_sample_logprobs, request.reading) == (3, worker_pb2.Reading(chat=True, logprobs=True))
    assert json.loads(server.worker.prompts[0].conversation) == HELLO
    assert server.worker.tenants == ["default"]
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["Hello", "Hello"]
    prompt = len(request.prompt_tokens) // 4
    used = {"prompt_tokens": prompt, "completion_tokens": 10, "total_tokens": prompt + 10}
    assert answer["usage"] == used | {"prompt_tokens_details": {"cached_tokens": 1}}


async def test_biases_penalties_and_constraints_reach_the_sampler(server: TestedServer) -> None:
    changes = {"logit_bias": {"7": -2.5}, "frequency_penalty": 0.5, "presence_penalty": -1}
    await send_request(server, COMPLETIONS, **changes, response_format={"type": "json_object"})
    (request,) = server.worker.samples.values()
    assert (dict(request.logit_bias), request.frequency_penalty, request.presence_penalty) == ({7: -2.5}, 0.5, -1)
    assert request.constraint == worker_pb2.Constraint(json_object=worker_pb2.JsonObject())


@pytest.mark.core("POST /oai/api/v1/completions")
async def test_a_prompt_of_tokens_is_used_unchanged(server: TestedServer) -> None:
    await send_request(server, COMPLETIONS, prompt=[5, 6])
    (request,) = server.worker.samples.values()
    assert request.prompt_tokens == b"\5\0\0\0\6\0\0\0"
    assert list(request.stop_tokens) == [END_TOKEN]


async def test_a_checkpoint_may_be_named_together_with_its_base_model(server: TestedServer) -> None:
    path = await saved_sampler(server)
    await send_request(server, COMPLETIONS, model=f"{BASE_MODEL};{path}")
    (request,) = server.worker.samples.values()
    assert request.adapter.directory == server.worker.events[-1].checkpoint_saved.directory
    refused = await server.client.post(
        f"http://server{COMPLETIONS}", json={"model": f"org/other;{path}", "prompt": "a"}
    )
    assert f"is a checkpoint of {BASE_MODEL}, and base_model is org/other" in refused.json()["error"]["message"]


@pytest.mark.core("GET /anthropic/api/v1/models")
async def test_models_are_listed_in_the_form_of_the_client_that_asks(server: TestedServer) -> None:
    path = await saved_sampler(server)
    known = (await server.client.get("http://server/v1/models")).json()
    assert known["object"] == "list"
    names = [one["id"] for one in known["data"]]
    version = {"anthropic-version": "2023-06-01"}
    for base, headers in (("/anthropic/api/v1", {}), ("/v1", version)):
        listed = (await server.client.get(f"http://server{base}/models", headers=headers)).json()
        assert [one["id"] for one in listed["data"]] == names
        assert {one["type"] for one in listed["data"]} == {"model"}
        assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, names[0], names[-1])
        one = await server.client.get(f"http://server{base}/models/{path}", headers=headers)
        assert one.json() == listed["data"][names.index(path)]
        page = await server.client.get(f"http://server{base}/models", params={"limit": 1}, headers=headers)
        assert (page.json()["has_more"], page.json()["last_id"]) == (True, names[0])
        lost = await server.client.get(f"http://server{base}/models", params={"after_id": "x"}, headers=headers)
        assert (lost.status_code, lost.json()["type"]) == (404, "error")
        wrong = await server.client.get(f"http://server{base}/models", params={"limit": 0}, headers=headers)
        assert wrong.status_code == 400
        assert wrong.json()["error"]["message"] == "query.limit: Input should be greater than or equal to 1"


@pytest.mark.core("GET /oai/api/v1/models")
async def test_models_are_the_base_models_and_the_tenants_own_saved_samplers(server: TestedServer) -> None:
    path = await saved_sampler(server)
    for base in ("/oai/api/v1", "/v1"):
        listed = (await server.client.get(f"http://server{base}/models")).json()["data"]
        assert {BASE_MODEL, path} <= {model["id"] for model in listed}
        others_list = await server.client.get(f"http://server{base}/models", headers=await other_tenant(server))
        assert path not in {model["id"] for model in others_list.json()["data"]}
        one = await server.client.get(f"http://server{base}/models/{path}")
        assert (one.status_code, one.json()["id"]) == (200, path)


async def test_a_saved_sampler_is_there_for_its_tenant_and_once_published_for_others(server: TestedServer) -> None:
    model = await saved_sampler(server)
    headers = await other_tenant(server)
    for path in BODIES:
        assert (await send_request(server, path, model=model)).status_code == 200
        refused = await send_request(server, path, headers=headers, model=model)
        assert (refused.status_code, message_of(refused)) == (404, f"there is no checkpoint {model}")
    assert all(request.adapter.directory for request in server.worker.samples.values())
    run, _, name = model.removeprefix("tinker://").split("/")
    await server.client.post(f"/training_runs/{run}/checkpoints/sampler_weights/{name}/publish")
    assert (await send_request(server, CHAT, headers=headers, model=model)).status_code == 200


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"model": "unheard/of"}, 404, "there is no model 'unheard/of'"),
    ({"model": "tinker://a/weights/b"}, 404, "needs one made by save_weights_for_sampler"),
    ({"temperature": -1.0}, 400, "temperature"),
    ({"top_p": 0.0}, 400, "top_p"),
]


async def test_an_invalid_request_gets_a_message(server: TestedServer) -> None:
    for path in BODIES:
        for fields, status, words in WRONG:
            refused = await send_request(server, path, **fields)
            assert refused.status_code == status
            assert words in message_of(refused)
    assert server.worker.samples == {}


async def test_a_sampler_that_stays_full_is_a_429_after_some_patience(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "PATIENCE_SECONDS", 0.0)
    server.worker.sampler_full = True
    for path in BODIES:
        refused = await send_request(server, path)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.core("POST /anthropic/api/v1/messages/count_tokens")
async def test_sampled_tokens_are_counted_on_the_keys_rate(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, sampled_tokens_per_minute=1), fleet) as server:
        assert (await send_request(server, CHAT)).status_code == 200
        refused = await send_request(server, MESSAGES)
        assert refused.status_code == 429
        assert "setting sampled_tokens_per_minute" in message_of(refused)
        assert (await send_request(server, COUNT, messages=HELLO)).status_code == 200, "counting samples nothing"


async def test_a_path_that_only_begins_like_a_short_one_is_none(server: TestedServer) -> None:
    for path in ("/v1x/models", "/v10", "/V1/models", "/api/v1/v1/models"):
        missing = await server.client.get(f"http://server{path}")
        assert (missing.status_code, missing.json().keys()) == (404, {"detail"})


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_client_that_goes_away_stops_its_sample_and_gives_its_place_back(
    tmp_path: Path, fleet: FakeFleet, path: str, streamed: bool
) -> None:
    async with running_server(settings_for(tmp_path, samples_per_tenant=1), fleet) as server:
        server.worker.withholds_texts = True
        await leave(server, path, streamed)
        assert server.worker.cancelled == list(server.worker.samples)
        server.worker.withholds_texts = False
        assert (await send_request(server, path)).status_code == 200, "a tenant may have one sample here"


async def leave(server: TestedServer, path: str, streamed: bool) -> None:
    """Send a request, and disconnect once its sample is drawn, or its first event has come."""
    body = json.dumps({"model": BASE_MODEL, "stream": streamed, **BODIES[path]}).encode()
    seen = asyncio.Event()
    messages: AsyncIterator[dict[str, Any]] = arriving(body, seen, server)

    async def receive() -> dict[str, Any]:
        return await anext(messages)

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            seen.set()

    headers = [(b"x-api-key", API_KEY.encode()), (b"content-length", str(len(body)).encode())]
    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""},
        **{"headers": headers, "client": ("127.0.0.1", 1), "server": ("server", 80), "scheme": "http"},
        **{"http_version": "1.1", "root_path": "", "asgi": {"version": "3.0"}},
    }
    if not streamed:
        server.worker.on_text = seen.set
    await server.app(scope, receive, send)


async def arriving(body: bytes, seen: asyncio.Event, server: TestedServer) -> AsyncIterator[dict[str, Any]]:
    yield {"type": "http.request", "body": body, "more_body": False}
    await seen.wait()
    yield {"type": "http.disconnect"}


async def test_a_stream_that_breaks_off_says_why_in_its_last_event(server: TestedServer) -> None:
    server.worker.withholds_texts = True

    async def read(path: str) -> list[str]:
        body = {"model": BASE_MODEL, "stream": True, **BODIES[path]}
        server.worker.on_text = server.worker.samples.clear
        answer = await server.client.post(f"http://server{path}", json=body)
        return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]

    assert json.loads((await read(CHAT))[-1])["error"]["type"] == "server_error"
    assert json.loads((await read(MESSAGES))[-1])["error"]["type"] == "overloaded_error"


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_continues_over_a_new_connection_to_its_sampler(
    server: TestedServer, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """A renewed certificate, or a network that fails for a moment, ends calls and not their samples."""
    monkeypatch.setattr(texts, "PAUSE_SECONDS", 0.01)
    whole = await server.client.post(
        f"http://server{CHAT}", json={"model": BASE_MODEL, "stream": streams, **BODIES[CHAT]}
    )
    server.worker.text_breaks = 2
    again = await server.client.post(
        f"http://server{CHAT}", json={"model": BASE_MODEL, "stream": streams, **BODIES[CHAT]}
    )
    assert (again.status_code, server.worker.text_breaks) == (200, 0)
    assert again.text.count("Hello") == whole.text.count("Hello") > 0
    assert "error" not in again.text


async def test_a_server_that_stops_lets_its_answers_go(server: TestedServer) -> None:
    server.worker.withholds_texts = True
    server.worker.on_text = server.services.long_polls.release
    refused = await send_request(server, CHAT)
    assert refused.status_code == 503
    assert "the server is stopping" in message_of(refused)


OPENAI_MISSES = [
    *("/v1/responses", "/v1/embeddings", "/v1/", "/v1", "/v1/messages/batches", "/v1/chat/completions/more"),
    *("/oai/api/v1/responses", "/oai/api/v1", "/oai/v1/chat/completions", "/oai/chat/completions", "/oai"),
    *("/chat/completions", "/completions", "/responses", "/models", "/models/a/b", "/embeddings"),
    *("/api/v1/chat/completions", "/api/v1/completions", "/api/v1/responses", "/api/v1/embeddings"),
]
ANTHROPIC_MISSES = [
    *("/anthropic/api/v1/complete", "/anthropic/api/v1", "/anthropic/v1/messages", "/anthropic", "/messages"),
    *("/anthropic/api/v1/messages/batches", "/api/v1/messages"),
]
HOST = {"Host": "tin.example:81"}


async def test_a_call_that_openais_clients_miss_names_the_base_url(server: TestedServer) -> None:
    for method, path in product(("GET", "POST"), OPENAI_MISSES):
        refused = await server.client.request(method, f"http://server{path}", headers=HOST)
        assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error"), path
        assert message_of(refused).startswith(f"{method} {path} is not a call of this server, which has /models, ")
        assert message_of(refused).endswith("set the client's base URL to http://tin.example:81/v1")


async def test_a_call_that_anthropics_clients_miss_names_the_base_url(server: TestedServer) -> None:
    for method, path in product(("GET", "POST"), ANTHROPIC_MISSES):
        refused = await server.client.request(method, f"http://server{path}", headers=HOST)
        assert (refused.status_code, refused.json()["type"]) == (404, "error"), path
        assert message_of(refused).startswith(
            f"{method} {path} is not a call of this server, which has /v1/messages and "
        )
        assert message_of(refused).endswith("set the client's base URL to http://tin.example:81")
