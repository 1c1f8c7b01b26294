"""The process of a token server: start, health, log and end.

The server ends together with this process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable

import structlog

from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.token_server import supervisor
from tinsmith_trainer.sampling.token_server.base import ServerCommand

log = structlog.get_logger(__name__)

LOOK_SECONDS = 0.5
KEPT_LINES = 20
LONGEST_LINE_BYTES = 1024**2
END_SECONDS = supervisor.STOP_SECONDS + 5.0
LAST_WORDS_SECONDS = 5.0
"""The maximum time for reading the output of a server that has ended.

A child process that left the session may keep the output open.
"""

PERIOD_SECONDS = 10.0
ILL_SECONDS = 60.0
"""The time for which a server may be unhealthy. A liveness probe allows the same time."""


class ServerProcess:
    """A process of a server. Used on one event loop. `name` is for messages and logs."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, hold: int, secret: str = "") -> None:
        self._name = name
        self._secret = secret
        self._process = process
        self._hold = hold
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, name: str, command: ServerCommand) -> ServerProcess:
        """Start the process and return at once. `until_healthy` waits until the server answers."""
        for path, text in command.files.items():
            path.write_text(text)
        held, hold = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", supervisor.__name__, str(held), *command.words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=(held,),
                # a signal to the whole process group would end the supervisor, but not the server
                start_new_session=True,
                env={**os.environ, **command.environment},
                limit=LONGEST_LINE_BYTES,
            )
        except BaseException:
            os.close(hold)
            raise
        finally:
            os.close(held)
        log.info("a token server was started", server=name, command=" ".join(command.words))
        return cls(name, process, hold, command.secret)

    async def until_healthy(self, is_healthy: Callable[[], Awaitable[bool]], timeout_seconds: float) -> None:
        """Wait until the server is healthy.

        Raises ServerError, with the server's last output, if the server ends early or is not healthy in time.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                while not await is_healthy():
                    await self._ended_within(LOOK_SECONDS)
        except TimeoutError:
            raise ServerError(
                f"{self._name} does not serve after {timeout_seconds:g} s. Its last words: {self.last_words()}"
            ) from None

    async def ended(self) -> ServerError:
        """Wait until the server ends by itself, and return the reason."""
        await self._process.wait()
        await asyncio.wait({self._listening}, timeout=LAST_WORDS_SECONDS)
        return ServerError(
            f"{self._name} ended with status {self._process.returncode}. Its last words: {self.last_words()}"
        )

    async def stop(self) -> None:
        """Close the pipe, and wait until the server has ended."""
        self.close_pipe()
        try:
            async with asyncio.timeout(END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.wait({self._listening}, timeout=LAST_WORDS_SECONDS)
        self._listening.cancel()

    def close_pipe(self) -> None:
        """Close the pipe. After the close of the pipe, the server ends soon. Idempotent."""
        if self._hold >= 0:
            os.close(self._hold)
            self._hold = -1

    def last_words(self) -> str:
        return " | ".join(self._lines) or "none"

    async def _ended_within(self, seconds: float) -> None:
        """Raise ServerError if the server ends within this time."""
        ended = asyncio.create_task(self.ended())
        done, _ = await asyncio.wait({ended}, timeout=seconds)
        if done:
            raise ended.result()
        ended.cancel()

    async def _listen(self) -> None:
        """Write the output of the server as log lines, so that all lines of a pod's log have one format."""
        assert self._process.stdout is not None
        while content := await _line(self._process.stdout):
            line = content.decode(errors="replace").rstrip()
            if self._secret:
                line = line.replace(self._secret, "…")
            if line:
                self._lines.append(line)
                log.info("a token server says", server=self._name, line=line)


async def until_ill(
    is_healthy: Callable[[], Awaitable[bool]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    note: Callable[[float], None] = lambda _: None,
) -> None:
    """Wait until the server has been unhealthy for `ILL_SECONDS`.

    A check without an answer counts as unhealthy. `note` is called after each check with the time since the last
    success, which is 0 if the check succeeds.
    """
    well = clock()
    while clock() - well < ILL_SECONDS:
        await sleep(PERIOD_SECONDS)
        if await is_healthy():
            well = clock()
            note(0.0)
        else:
            note(clock() - well)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """Return a line. If the line is too long, return a part of the line."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.read(error.consumed)
