"""The connections between the parts of an installation in one process: HTTP and gRPC without sockets.

Both copy what they carry, and both can be cut: waiting callers then get the error of a broken connection.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import orjson
from google.protobuf.message import Message
from support.server.http_server import API_KEY
from tinsmith_rpc import worker_pb2_grpc
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_trainer.worker.grpc_server import WorkerServicer
from typing_extensions import override

Metadata = grpc.aio.Metadata
NO_METADATA = Metadata()


@dataclass(frozen=True, slots=True)
class Response:
    """`text` and `json` as httpx has them."""

    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        return orjson.loads(self.content)


async def post(app: Any, path: str, body: dict[str, Any] | bytes, key: str = "") -> Response:
    """Post to an ASGI application, as its only client, with an idempotency key if it is not empty."""
    kind = b"application/x-protobuf" if isinstance(body, bytes) else b"application/json"
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = [
        (b"host", b"server"),
        (b"x-api-key", API_KEY.encode()),
        (b"content-type", kind),
        (b"content-length", str(len(content)).encode()),
        *([(b"idempotency-key", key.encode())] if key else []),
    ]
    url = f"/api/v1{path}"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "headers": headers,
        "scheme": "http",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "server": ("server", 80),
        "client": ("127.0.0.1", 1),
        "root_path": "",
    }
    asked, status, parts = False, 0, bytearray()

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await asyncio.Event().wait()  # the client stays
        asked = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.extend(message.get("body", b""))

    await app(scope, receive, send)
    return Response(status, bytes(parts))


class WorkerLine:
    """The stub of a worker's service, until it is cut."""

    def __init__(self, servicer: WorkerServicer) -> None:
        self._servicer = servicer
        self._calls: set[asyncio.Task[Message]] = set()
        self._is_cut = False

    def cut(self) -> None:
        self._is_cut = True
        for call in self._calls:
            call.cancel()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Message]]:
        assert hasattr(worker_pb2_grpc.WorkerServicer, name), name
        method = getattr(self._servicer, name)

        async def call(request: Message, timeout: float, metadata: Metadata | None = None) -> Message:
            if self._is_cut:
                raise _error(grpc.StatusCode.UNAVAILABLE, "the worker is gone")
            copy = type(request).FromString(request.SerializeToString())
            task = asyncio.create_task(method(copy, CallContext(metadata or NO_METADATA)))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            try:
                async with asyncio.timeout(timeout):
                    reply: Message = await task
                    return reply
            except TimeoutError:
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, "too late") from None
            except asyncio.CancelledError:
                if self._is_cut and not _is_cancelled():
                    raise _error(grpc.StatusCode.UNAVAILABLE, "the worker is gone") from None
                raise

        return call


class CallContext:
    """The part of a call's context that a servicer uses."""

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    def peer_identities(self) -> None:
        return None

    def auth_context(self) -> dict[str, Any]:
        return {}

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise _error(code, details)


class InProcessClient(GrpcWorkerClient):
    """The server's own client, on a line instead of a channel."""

    def __init__(self, line: WorkerLine) -> None:
        self._line = line
        self._stub = line  # type: ignore[assignment]
        self._epoch = 0

    @override
    async def close(self) -> None:
        self._line.cut()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, NO_METADATA, NO_METADATA, details)
