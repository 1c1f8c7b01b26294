"""The body limit of each route, and the answer to a larger body."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from support.server.fake_fleet import BASE_MODEL, FakeFleet
from support.server.http_server import PROTOBUF, TestedServer, one_server, running_server, settings_for, training_body
from tinsmith_server.routes.http.uploads import BODY_BYTES, limit_of
from tinsmith_server.services.training import operation_bodies
from tinsmith_server.wire.head import trained_tokens

pytestmark = pytest.mark.core

# Its files are larger than a test should send, and its limit has tests of its own.
UPLOAD = "/uploads/{token}/{name}"


DIALECTS = ("/oai/", "/anthropic/")


async def in_parts(content: bytes, size: int = 65536) -> AsyncIterator[bytes]:
    """Send the body in parts, without a length in its header."""
    for at in range(0, len(content), size):
        yield content[at : at + size]


@one_server
async def test_every_route_that_takes_a_body_has_a_limit(server: TestedServer) -> None:
    document = server.app.openapi()
    takers = {
        path.removeprefix("/api/v1")
        for path, methods in document["paths"].items()
        for operation in methods.values()
        if "requestBody" in operation
    }
    unread = {"/client/config", "/client/dynamic_config"}
    assert takers - unread | {"/telemetry"} == BODY_BYTES.keys()


@one_server
@pytest.mark.parametrize("path", sorted(BODY_BYTES.keys() - {"/telemetry", "/forward_backward", UPLOAD}))
@pytest.mark.parametrize("declared", [True, False], ids=["declared", "undeclared"])
async def test_one_byte_over_the_limit_is_refused_with_the_limit(
    server: TestedServer, path: str, declared: bool
) -> None:
    limit = limit_of(path, server.services.settings)
    body = b'{"a":"' + b"x" * (limit - 7) + b'"}'
    prefix = "" if path.startswith(DIALECTS) else "/api/v1"
    route = f"http://server{prefix}" + path.format_map(
        {"session_id": "s", "run_id": "r", "kind": "weights", "name": "n", "recording_id": "r", "tenant": "t"}
    )
    method = "PUT" if path.endswith(("/ttl", "/project", "/promotions/{name}", "/limits")) else "POST"
    response = await server.client.request(method, route, content=body if declared else in_parts(body))
    assert response.status_code == 413
    assert f"over the limit of {limit} bytes of {path}" in response.text
    within = await server.client.request(method, route, content=body[1:])
    assert within.status_code != 413


@one_server
async def test_the_head_of_a_training_body_is_enough_to_refuse_its_size(server: TestedServer) -> None:
    """Otherwise the SDK's training client would hang."""
    model_id = await server.model()
    never = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield training_body(model_id, 1)
        yield bytes(2**17)
        await never.wait()

    headers = {**PROTOBUF, "content-length": str(10**9)}
    submitted = await asyncio.wait_for(server.client.post("/forward_backward", content=body(), headers=headers), 30)
    failed = await server.outcome(submitted)
    assert "over the limit of 67108864 bytes of /forward_backward (setting max_body_bytes)" in failed["error"]


@one_server
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda packed: packed[:-4], "the data end before the checksum"),
        (lambda packed: packed * 2, "there are more data"),
    ],
    ids=["cut off", "two members"],
)
async def test_a_gzip_body_that_is_not_one_whole_member_is_not_trained_on(
    server: TestedServer, spoil: Callable[[bytes], bytes], words: str
) -> None:
    packed = spoil(gzip.compress(training_body(await server.model(), 1)))
    headers = {**PROTOBUF, "content-encoding": "gzip"}
    submitted = await server.client.post("/forward_backward", content=packed, headers=headers)
    assert words in (await server.outcome(submitted))["error"]


@one_server
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/create_session", b'{"user_metadata":{"a":' + b"[" * 2000 + b"]" * 2000 + b"}}"),
        ("/create_session", b'{"tags":[' + b'"",' * 60_000 + b'""]}'),
        ("/asample", b'{"prompt":{"chunks":[' + b"{}," * 2_000_000 + b"{}]}}"),
    ],
    ids=["depth", "texts", "chunks"],
)
async def test_a_body_made_of_too_much_is_a_422(server: TestedServer, path: str, body: bytes) -> None:
    response = await server.client.post(path, content=body)
    assert response.status_code == 422
    assert len(response.json()["detail"]) < 300


@one_server
@pytest.mark.parametrize("size", [1, 200, 40_000])
async def test_a_prompt_of_any_length_reaches_the_sampler_as_it_was_sent(server: TestedServer, size: int) -> None:
    tokens = [number * 7919 % 151_000 for number in range(size)]
    targets = {"data": tokens, "dtype": "int64", "shape": [size, 1]}
    chunks = [{"type": "encoded_text", "tokens": part} for part in (tokens[: size // 2], tokens[size // 2 :])]
    body: dict[str, Any] = {"prompt": {"chunks": chunks}, "target_prompt_logprobs": targets}
    sampled = await server.sample(await server.sampler(), **body)
    request = server.worker.samples[sampled.json()["request_id"]]
    assert not request.HasField("rejection")
    assert memoryview(request.prompt_tokens).cast("i").tolist() == tokens
    assert memoryview(request.target_prompt_logprobs.dense).cast("q").tolist() == tokens


async def test_metadata_over_the_limit_fails_the_future_and_is_not_kept(server: TestedServer) -> None:
    session = await server.session()
    made = await server.create_model(session, user_metadata={str(n): "x" for n in range(1000)}, base_model=BASE_MODEL)
    assert "user_metadata has 1000 keys; at most 128" in (await server.outcome(made))["error"]


@pytest.mark.parametrize("declared", [True, False])
async def test_the_unpacked_bytes_of_a_frame_count_against_the_budget_while_it_is_read(
    declared: bool, tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    threads: list[str] = []
    async with running_server(settings_for(tmp_path, trained_tokens_per_minute=10**9), fleet) as server:

        def counted(payload: bytes, unpacked_bytes: int | None = None) -> int:
            held.append(server.services.admission.bodies.held_bytes)
            threads.append(threading.current_thread().name)
            return trained_tokens(payload, unpacked_bytes)

        monkeypatch.setattr(operation_bodies, "trained_tokens", counted)
        body = training_body(await server.model(), 1) + b"\xfa\x07" + b"\x80\x80\x80\x04" + bytes(2**23)
        compressor = zstandard.ZstdCompressor()
        packing = compressor.compressobj(size=len(body)) if declared else compressor.compressobj()
        frame = packing.compress(body) + packing.flush()
        headers = {**PROTOBUF, "content-encoding": "zstd"}
        submitted = await server.client.post("/forward_backward", content=frame, headers=headers)
        assert submitted.status_code == 200
        assert len(frame) < len(body) <= held[0]
        assert threads != [threading.main_thread().name]
        assert server.services.admission.bodies.held_bytes == 0
