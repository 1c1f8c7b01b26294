"""Recordings of agents: what the sampler read and drew becomes sequences, and nothing is rendered twice."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import BASE_MODEL
from support.server.fake_worker import DRAWN, DRAWN_LOGPROBS, END_TOKEN
from support.server.http_server import TestedServer, one_server
from tinsmith_rpc import worker_pb2

pytestmark = pytest.mark.core

CHAT, COMPLETIONS, MODELS = "chat/completions", "completions", "models"
ASK = {"role": "user", "content": "How much is 2 + 3?"}
MORE = {"role": "user", "content": "And 4 + 5?"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
ANSWER = [*DRAWN, END_TOKEN]


def tokens_of(*messages: Any) -> list[int]:
    """Return the tokens that the worker renders, as the server writes the messages."""
    return list(json.dumps(list(messages), separators=(",", ":")).encode())


def added(*messages: Any) -> list[int]:
    """Return the tokens that the worker renders behind recorded tokens."""
    return list(json.dumps(list(messages)).encode())


async def opened(server: TestedServer, **fields: Any) -> dict[str, Any]:
    answer = await server.client.post("/recordings", json={"model": BASE_MODEL, **fields})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


async def send(
    server: TestedServer, recording: dict[str, Any], *messages: Any, path: str = CHAT, **fields: Any
) -> httpx.Response:
    body = {"model": "any", **({"messages": messages} if path == CHAT else {}), **fields}
    return await server.client.post(f"{recording['base_url']}/{path}", json=body)


async def answered(server: TestedServer, recording: dict[str, Any], *messages: Any, **fields: Any) -> dict[str, Any]:
    """Return the message of the answer, as a client sends it back."""
    answer = await send(server, recording, *messages, **fields)
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()["choices"][0]["message"]
    return message


async def sequences(server: TestedServer, recording: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await server.client.get(f"/recordings/{recording['recording_id']}")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["sequences"]
    return found


@pytest.mark.core("POST /oai/recordings/{recording_id}/v1/chat/completions", "GET /api/v1/recordings/{recording_id}")
async def test_a_later_turn_reads_the_drawn_tokens_and_renders_only_what_follows(server: TestedServer) -> None:
    recording = await opened(server)
    first = await answered(server, recording, ASK, temperature=0.5, frequency_penalty=1, logit_bias={"5": -2})
    await answered(server, recording, ASK, first, MORE)
    (found,) = await sequences(server, recording)
    prompt, suffix = tokens_of(ASK), added(MORE)
    assert found["tokens"] == [*prompt, *ANSWER, *suffix, *ANSWER]
    assert found["mask"] == [0] * len(prompt) + [1] * 3 + [0] * len(suffix) + [1] * 3
    drawn = list(DRAWN_LOGPROBS)
    assert found["logprobs"] == [0] * len(prompt) + drawn + [0] * len(suffix) + drawn
    sent = list(server.worker.samples.values())[-1]
    assert list(memoryview(sent.prompt_tokens).cast("i")) == found["tokens"][:-3]
    one, two = found["segments"]
    assert [(one["start"], one["end"]), two["end"]] == [(len(prompt), len(prompt) + 3), len(found["tokens"])]
    assert (one["reason"], two["reason"], found["reason"]) == ("first", "extends", "first")
    assert (one["model_path"], one["finish_reason"]) == (BASE_MODEL, "length")
    params = {"temperature": 0.5, "frequency_penalty": 1.0, "logit_bias": {"5": -2.0}}
    assert one["sampling_params"].items() >= params.items()
    assert two["sampling_params"]["temperature"] == 1.0


async def test_tool_results_extend_and_dropped_reasoning_comes_back_from_the_record(server: TestedServer) -> None:
    """Clients may leave the reasoning out, and may give calls other IDs."""
    server.worker.reasoning = "Let me think."
    server.worker.tool_call = worker_pb2.ToolCall(name="add", arguments='{"a": 2, "b": 3}')
    recording = await opened(server)
    first = await answered(server, recording, ASK, tools=TOOLS)
    call = {**first["tool_calls"][0], "id": "mine"}
    call["function"] = {"name": "add", "arguments": '{"b":3,"a":2}'}
    echoed = {"role": "assistant", "content": "Hello ", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "mine", "content": "5"}
    await answered(server, recording, ASK, echoed, result, tools=TOOLS)
    (found,) = await sequences(server, recording)
    assert [segment["finish_reason"] for segment in found["segments"]] == ["length", "length"]
    asked = [prompt for prompt in server.worker.prompts if prompt.HasField("recorded")][-1]
    assert (asked.recorded.messages, asked.recorded.last_token) == (2, END_TOKEN)
    assert json.loads(asked.conversation)[1]["reasoning_content"] == "Let me think."


@pytest.mark.parametrize(
    ("obstacle", "reason"),
    [
        (worker_pb2.REASONING_REMOVED, "reasoning_removed"),
        (worker_pb2.HISTORY_REWRITTEN, "history_rewritten"),
        (worker_pb2.ANSWER_NOT_CLOSED, "answer_not_closed"),
    ],
)
@one_server
async def test_a_template_that_cannot_extend_begins_a_sequence_with_its_reason(
    server: TestedServer, obstacle: worker_pb2.ExtensionObstacle.ValueType, reason: str
) -> None:
    recording = await opened(server)
    first = await answered(server, recording, ASK)
    server.worker.obstacle = obstacle
    await answered(server, recording, ASK, first, MORE)
    before, after = await sequences(server, recording)
    assert (before["reason"], after["reason"]) == ("first", reason)
    whole = tokens_of(ASK, {"role": "assistant", "content": "Hello"}, MORE)
    assert (after["tokens"], sum(after["mask"])) == ([*whole, *ANSWER], 3)


@one_server
async def test_a_changed_conversation_begins_a_sequence_and_a_repeated_request_a_branch(server: TestedServer) -> None:
    recording = await opened(server)
    first = await answered(server, recording, ASK)
    await answered(server, recording, ASK, first, MORE)
    await answered(server, recording, ASK, first, MORE)
    await answered(server, recording, ASK, {"role": "assistant", "content": "Six"}, MORE)
    await answered(server, recording, MORE)
    await answered(server, recording, ASK, first, MORE, tools=TOOLS)
    found = await sequences(server, recording)
    assert [one["reason"] for one in found] == [
        *("first", "repeated", "history_changed", "new_conversation", "tools_changed")
    ]
    assert [sum(one["mask"]) for one in found] == [6, 3, 3, 3, 3], "each drawn token is trained once"
    assert not any(one["abandoned"] for one in found)
    second = {"role": "assistant", "content": "Hello"}
    await answered(server, recording, ASK, first, MORE, second, ASK)
    assert [one["abandoned"] for one in (await sequences(server, recording))[:2]] == [True, False]


@one_server
async def test_a_stream_and_several_choices_are_recorded_before_the_last_event(server: TestedServer) -> None:
    recording = await opened(server)
    streamed = await send(server, recording, ASK, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    (found,) = await sequences(server, recording)
    assert found["tokens"] == [*tokens_of(ASK), *ANSWER]
    await answered(server, recording, MORE, n=3)
    assert len(await sequences(server, recording)) == 4


@pytest.mark.core("POST /oai/recordings/{recording_id}/v1/completions")
@one_server
async def test_a_completion_extends_recorded_tokens_and_a_text_begins_anew(server: TestedServer) -> None:
    recording = await opened(server)
    assert (await send(server, recording, path=COMPLETIONS, prompt=[1, 2])).status_code == 200
    assert (await send(server, recording, path=COMPLETIONS, prompt=[1, 2, *ANSWER, 9])).status_code == 200
    assert (await send(server, recording, path=COMPLETIONS, prompt="Hi", stream=True)).status_code == 200
    tokens, text = await sequences(server, recording)
    assert tokens["tokens"] == [1, 2, *ANSWER, 9, *ANSWER]
    assert (text["tokens"], text["reason"]) == ([*b"Hi", *ANSWER], "completion")


async def test_each_turn_names_the_weights_that_drew_it(server: TestedServer) -> None:
    """A promoted name may move while an agent runs."""
    model_id, paths = await server.model(), []
    for number, name in enumerate(("one", "two"), 1):
        body = {"model_id": model_id, "seq_id": number, "path": name}
        paths.append((await server.outcome(await server.post("/save_weights_for_sampler", body)))["path"])
    await server.client.put("/promotions/prod", json={"model_path": paths[0]})
    recording = await opened(server, model="prod")
    first = await answered(server, recording, ASK)
    await server.client.put("/promotions/prod", json={"model_path": paths[1]})
    await answered(server, recording, ASK, first, MORE)
    (found,) = await sequences(server, recording)
    assert [segment["model_path"] for segment in found["segments"]] == paths
    assert all(len(segment["weights_digest"]) == 64 for segment in found["segments"])


@pytest.mark.core(
    "POST /api/v1/recordings",
    "GET /api/v1/recordings",
    "DELETE /api/v1/recordings/{recording_id}",
    "GET /oai/recordings/{recording_id}/v1/models",
    "GET /oai/recordings/{recording_id}/v1/models/{name}",
)
async def test_a_recording_belongs_to_its_tenant_until_it_is_deleted(server: TestedServer) -> None:
    recording = await opened(server)
    name, base_url = recording["recording_id"], recording["base_url"]
    stranger = {"X-API-Key": (await server.services.keys.create("stranger", "theirs")).secret}
    calls = [
        *(("GET", f"/recordings/{name}"), ("GET", f"{base_url}/{MODELS}"), ("GET", f"{base_url}/{MODELS}/any")),
        *(("POST", f"{base_url}/{CHAT}"), ("DELETE", f"/recordings/{name}")),
    ]

    async def statuses(headers: dict[str, str]) -> list[int]:
        body = {"model": "any", "messages": [ASK]}
        return [
            (await server.client.request(method, url, headers=headers, json=body)).status_code for method, url in calls
        ]

    assert await statuses(stranger) == [404] * 5
    assert (await server.client.get("/recordings", headers=stranger)).json()["recordings"] == []
    assert (await server.client.get(f"{base_url}/{MODELS}")).json()["data"][0]["id"] == BASE_MODEL
    listed = (await server.client.get("/recordings")).json()
    assert (listed["total"], listed["recordings"][0]["recording_id"]) == (1, name)
    wrong = await server.client.post(f"{base_url}/embeddings", json={})
    assert f"base URL to {base_url}" in wrong.json()["error"]["message"]
    assert await statuses({}) == [200] * 5
    assert await statuses({}) == [404] * 5


@one_server
async def test_a_recording_ends_at_its_turns_its_bytes_and_its_time(server: TestedServer) -> None:
    for limits, words in (({"max_turns": 1}, "limit of 1 turns"), ({"max_bytes": 300}, "limit of 300 bytes")):
        recording = await opened(server, **limits)
        first = await answered(server, recording, ASK)
        refused = await send(server, recording, ASK, first, MORE)
        assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True)
        assert len(await sequences(server, recording)) == 1
    recording = await opened(server, ttl_seconds=60)
    await answered(server, recording, ASK)
    server.time.pass_seconds(61)
    assert (await send(server, recording, ASK)).status_code == 404
    await server.services.background.sweep_now()
    assert (await server.client.get("/recordings")).json()["total"] == 2
    refused = await server.client.post("/recordings", json={"model": "nothing"})
    assert (refused.status_code, "there is no model 'nothing'" in refused.text) == (404, True)


@one_server
async def test_an_agent_that_hangs_up_before_the_answer_leaves_no_turn(server: TestedServer) -> None:
    recording = await opened(server)
    server.worker.withholds_texts = True
    waiting = asyncio.Event()
    server.worker.on_text = waiting.set
    asking = asyncio.create_task(send(server, recording, ASK))
    await waiting.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    server.worker.withholds_texts = False
    assert await sequences(server, recording) == []
    await answered(server, recording, ASK)
    (found,) = await sequences(server, recording)
    assert found["reason"] == "first"
