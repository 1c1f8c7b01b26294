"""HTTP calls to a token server, and a thread with the event loop for these calls."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from typing import Any, TypeVar, TypeVarTuple

import aiohttp

from tinsmith_trainer.errors import SamplerClosed, ServerError, TrainerError, UserError
from tinsmith_trainer.sampling.token_server.base import SOCKET_SCHEME

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class LoopThread:
    """A thread with an event loop, which runs from the construction until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine.

        Return the result of the coroutine, or raise the coroutine's error. Call this from another thread.
        """
        return self.begin(coroutine).result()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Start a coroutine. Thread-safe. Call `begin` before `stop`, which cancels running coroutines."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, function: Callable[[*Arguments], None], *arguments: *Arguments) -> bool:
        """Schedule a function on the loop; functions run in the order of the calls.

        Thread-safe. Return False after `stop`.
        """
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # closed
            return False
        return True

    def stop(self) -> None:
        """Cancel all running coroutines, and stop the loop. Call `stop` from another thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())


HEALTH_SECONDS = 30.0
LOAD_SECONDS = 120.0
"""The time limit of a load or unload of an adapter, which waits for the server's current step."""
MESSAGE_CHARACTERS = 500
EVENT, END_OF_EVENTS = b"data: ", b"[DONE]"
EVENT_BYTES = 1024**2
"""The longest event. An event has one token with its most likely alternatives, or several tokens."""

IsRefusal = Callable[[int, str], bool]
"""A function that decides from the status and the message whether the request is invalid."""


def refused_by_status(status: int, message: str) -> bool:
    return 400 <= status < 500


class JsonCalls:
    """An HTTP client of one server. `name` is for messages. Create the client in a running event loop."""

    def __init__(self, name: str, address: str, key: str = "") -> None:
        """Create the client.

        `address` is a URL, or `unix:` and the path of a socket. `key` is sent with each request.
        """
        self._name = name
        socket = address.removeprefix(SOCKET_SCHEME)
        self._session = aiohttp.ClientSession(
            address if socket == address else "http://localhost",
            # The number of connections has no limit, because health checks would wait for requests. Connections are not
            # reused, because a server may close a connection while the next request is on its way.
            connector=(
                aiohttp.TCPConnector(limit=0, force_close=True)
                if socket == address
                else aiohttp.UnixConnector(socket, limit=0, force_close=True)
            ),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            trust_env=False,
        )

    async def post(
        self,
        path: str,
        body: Mapping[str, object],
        is_refusal: IsRefusal = refused_by_status,
        *,
        limit_seconds: float | None = None,
    ) -> Any:
        """Send a request. Return the JSON of the answer, or None if the answer is not JSON.

        A generation has no limit in time; the health watch ends a server that does not answer. Raises UserError if the
        server finds the request invalid, ServerError if the server fails or exceeds the limit, and SamplerClosed if the
        server cannot be reached.
        """
        limits = aiohttp.ClientTimeout(total=limit_seconds, sock_connect=HEALTH_SECONDS)
        try:
            async with self._session.post(path, json=body, timeout=limits) as response:
                content = await response.text()
        except aiohttp.ClientError as error:
            raise SamplerClosed(f"{self._name} cannot be reached: {type(error).__name__}: {error}.") from error
        except TimeoutError as error:
            raise ServerError(f"{self._name} has not answered {path} for {limit_seconds:g} s.") from error
        if response.status != 200:
            raise self._failure(path, response.status, _error_message(content), is_refusal)
        try:
            return json.loads(content)
        except ValueError:
            return None

    async def stream(
        self,
        path: str,
        body: Mapping[str, object],
        is_refusal: IsRefusal = refused_by_status,
        *,
        error_status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
    ) -> AsyncIterator[Any]:
        """Send a request, and yield the JSON of each event of the answer. Raises the errors of `post`.

        An event with an error has no status of its own; `error_status` is the status that `post` would have received.
        """
        limits = aiohttp.ClientTimeout(total=None, sock_connect=HEALTH_SECONDS)
        try:
            async with self._session.post(path, json=body, timeout=limits, read_bufsize=EVENT_BYTES) as response:
                if response.status != 200:
                    content = await response.text()
                    raise self._failure(path, response.status, _error_message(content), is_refusal)
                async for line in response.content:
                    data = line.strip().removeprefix(EVENT)
                    if data and data != END_OF_EVENTS:
                        event = json.loads(data)
                        if "error" in event:
                            raise self._failure(path, error_status, _error_message(json.dumps(event)), is_refusal)
                        yield event
        except (aiohttp.ClientError, ValueError) as error:
            raise SamplerClosed(f"{self._name} cannot be reached: {type(error).__name__}: {error}.") from error

    async def succeeds(self, path: str) -> bool:
        """Return whether the answer to a GET has the status 200."""
        try:
            async with self._session.get(path, timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def text(self, path: str) -> str:
        """Return the answer to a GET, or an empty text if there is no answer with the status 200."""
        try:
            async with self._session.get(path, timeout=aiohttp.ClientTimeout(total=HEALTH_SECONDS)) as response:
                return await response.text() if response.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError):
            return ""

    async def close(self) -> None:
        await self._session.close()

    def _failure(self, path: str, status: int, message: str, is_refusal: IsRefusal) -> TrainerError:
        kind = UserError if is_refusal(status, message) else ServerError
        return kind(f"{self._name} answered {path} with status {status}: {message[:MESSAGE_CHARACTERS]}")


def _error_message(content: str) -> str:
    """Return the message in an error's JSON. The place of the message in the JSON depends on the server."""
    try:
        body = json.loads(content)
    except ValueError:
        return content
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error.get("error_message")) if isinstance(error, dict) else error
    return str(message) if message else content
