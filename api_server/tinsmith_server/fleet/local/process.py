"""The process of a worker: its start, first answer, end, and last message."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tinsmith_server.errors import WorkerError, WorkerUnavailable
from tinsmith_server.fleet.client import GrpcWorkerClient
from tinsmith_server.fleet.local.devices import THREADS_VARIABLE, worker_threads

T = TypeVar("T")

STDERR = 2
# The exit codes for contradictory flags, and for a model that cannot be loaded.
EXITS_UNTIL_MENDED = frozenset({2, 3})
SENTENCE_PREFIX = "tinsmith-trainer: "
SOCKET_POLL_SECONDS = 0.05
# A worker snapshots every model on SIGTERM.
STOP_TIMEOUT_SECONDS = 60.0
# The output is already in the pipe, but this server may read it late on a busy host.
LAST_WORDS_SECONDS = 10.0
# The same limits as those of the liveness probe in a cluster. A process that misses the last check is ended.
CHECK_EACH_SECONDS = 10.0
CHECK_SECONDS = 10.0
MOST_MISSED_CHECKS = 6
# The worker does not need the server's key. Its environment is visible in /proc.
SECRET_VARIABLES = frozenset({"TINSMITH_API_KEY", "TINSMITH_DATABASE_URL"})


def worker_environment(device: Mapping[str, str] = {}) -> dict[str, str]:
    """Return the server's environment without secrets, and with the variables for the worker's device."""
    own = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    return {THREADS_VARIABLE: str(worker_threads()), **own, **device}


class WorkerDied(WorkerUnavailable):
    """The process ended before the call was complete."""


class WorkerHung(WorkerUnavailable):
    """The process runs, but does not answer, or does not finish an operation. It must be ended."""


class WorkerProcess:
    """A child process that never runs longer than the server.

    The process inherits a pipe, and exits when the pipe is closed.
    """

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int, socket: Path) -> None:
        self._process = process
        self._lifeline = lifeline
        self._socket = socket
        self._sentence: str | None = None
        self._reading = asyncio.create_task(self._pass_on_stderr())
        self.missed_checks = 0
        self.client = GrpcWorkerClient(f"unix:{socket}")

    @classmethod
    async def start(
        cls, command: Callable[[Path, int], Sequence[str]], socket: Path, device: Mapping[str, str]
    ) -> WorkerProcess:
        """Start the process.

        `command` receives the socket's path and the file descriptor from which the pipe can be read.
        """
        reading, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command(socket, reading),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                stdout=STDERR,  # the server prints only its URL on standard output
                pass_fds=(reading,),
                env=worker_environment(device),
                start_new_session=True,  # Ctrl-C must reach only the server, which then stops its workers
            )
        except OSError:
            os.close(lifeline)
            raise
        finally:
            os.close(reading)
        return cls(process, lifeline, socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def until_serving(self) -> None:
        """Wait for the first answer of the process. Raises WorkerDied if the process ends without an answer."""
        while not self._socket.exists():
            if self._process.returncode is not None:
                await self.wait()
                raise WorkerDied(self.cause_of_death())
            await asyncio.sleep(SOCKET_POLL_SECONDS)
        while True:
            try:
                await self.unless_dead(self.client.describe())
                return
            except WorkerDied:
                raise
            except WorkerUnavailable:
                await asyncio.sleep(SOCKET_POLL_SECONDS)

    async def until_hung(self, hang_timeout_seconds: float, on_check: Callable[[], None]) -> NoReturn:
        """Check the process until it hangs, and call `on_check` after each check.

        Raises WorkerHung after MOST_MISSED_CHECKS missed checks in a row, and for an operation that has run for longer
        than `hang_timeout_seconds`.
        """
        while self.missed_checks < MOST_MISSED_CHECKS:
            if not self.missed_checks:
                await asyncio.sleep(CHECK_EACH_SECONDS)
            running_seconds = await self._running_seconds()
            self.missed_checks = 0 if running_seconds is not None else self.missed_checks + 1
            on_check()
            if running_seconds is not None and running_seconds > hang_timeout_seconds:
                raise WorkerHung(
                    f"one operation had run for {running_seconds:.0f} s, so the process was ended; if operations take "
                    f"that long, raise the setting hang_timeout_seconds, which is {hang_timeout_seconds:g}"
                )
        raise WorkerHung(f"the process had not answered for {self.silent_seconds:g} s, and was ended")

    @property
    def silent_seconds(self) -> float:
        """The time for which the process has missed checks."""
        return self.missed_checks * CHECK_SECONDS

    @property
    def silence_limit_seconds(self) -> float:
        """The value of `silent_seconds` at which the process counts as hung."""
        return MOST_MISSED_CHECKS * CHECK_SECONDS

    async def _running_seconds(self) -> float | None:
        """Return how long the current operation has run, or None if the process does not answer in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_SECONDS):
                while True:
                    with contextlib.suppress(WorkerError):
                        return (await self.client.describe()).running_seconds
                    await asyncio.sleep(SOCKET_POLL_SECONDS)
        return None

    async def unless_dead(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of the call. Raises WorkerDied as soon as the process has ended."""
        work, death = asyncio.create_task(call), asyncio.create_task(self.wait())
        try:
            await asyncio.wait({work, death}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise WorkerDied(self.cause_of_death())
            return work.result()
        finally:
            work.cancel()
            death.cancel()

    async def wait(self) -> int:
        """Return the exit status when all output of the process has been read."""
        status = await self._process.wait()
        await asyncio.wait({self._reading}, timeout=LAST_WORDS_SECONDS)
        return status

    @property
    def needs_mending(self) -> bool:
        """True if restarts fail until a person corrects the model's directory or the worker's flags."""
        return self._process.returncode in EXITS_UNTIL_MENDED

    def cause_of_death(self) -> str:
        """Return the last message of the process, or a description of its exit if there is no message."""
        return self._sentence or f"the worker process ended with status {self._process.returncode}"

    async def stop(self) -> None:
        """Send SIGTERM, wait for the snapshots, then close the pipe and send SIGKILL."""
        if self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_SECONDS):
                    await self._process.wait()
        await self.discard()

    async def discard(self) -> None:
        """Kill the process if it has not ended, and free its resources."""
        if self._process.returncode is None:
            self._process.kill()
        os.close(self._lifeline)
        await self.wait()
        self._reading.cancel()
        await self.client.close()
        self._socket.unlink(missing_ok=True)

    async def _pass_on_stderr(self) -> None:
        assert self._process.stderr is not None
        unfinished = b""
        while part := await self._process.stderr.read(65536):
            *lines, unfinished = (unfinished + part).split(b"\n")
            for line in lines:
                self._note(line)
        if unfinished:
            self._note(unfinished)

    def _note(self, line: bytes) -> None:
        """Write the line to the log, unless the supervisor logs the same message as the cause of the exit."""
        text = line.decode(errors="replace").rstrip()
        if text.startswith(SENTENCE_PREFIX):
            self._sentence = text.removeprefix(SENTENCE_PREFIX)
        else:
            # A line that cannot be written is dropped. If reading stopped, the worker would soon block when it writes
            # its log.
            with contextlib.suppress(OSError, ValueError):
                print(text, file=sys.stderr, flush=True)
