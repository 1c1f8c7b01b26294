"""A server's process: its output, the time limit of its start, and that it never outlives its parent."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.waiting import until
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.token_server.base import ServerCommand
from tinsmith_trainer.sampling.token_server.server_process import ServerProcess

FOR_EVER = "import time\nwhile True: time.sleep(60)"
WITH_A_WORKER = f"""
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {FOR_EVER!r}])
print(worker.pid, flush=True)
{FOR_EVER}
"""


def program(code: str, **environment: str) -> ServerCommand:
    return ServerCommand([sys.executable, "-c", code], environment)


def answer(value: bool) -> Callable[[], Awaitable[bool]]:
    async def look() -> bool:
        return value

    return look


@asynccontextmanager
async def started(command: ServerCommand) -> AsyncIterator[ServerProcess]:
    process = await ServerProcess.start("the server", command)
    try:
        yield process
    finally:
        await process.stop()


def is_alive(pid: int) -> bool:
    """Return whether the process lives; a zombie, which its parent has not collected, is dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_server_that_answers_is_waited_for_no_longer() -> None:
    async with started(program(FOR_EVER)) as process:
        await process.until_healthy(answer(True), timeout_seconds=60)


async def test_a_server_that_ends_before_it_serves_is_quoted() -> None:
    async with started(program("print('out of memory', flush=True); raise SystemExit(7)")) as process:
        with pytest.raises(ServerError, match=r"^the server ended with status 7\. Its last words: out of memory$"):
            await process.until_healthy(answer(False), timeout_seconds=60)


async def test_a_server_that_never_serves_is_given_up_with_its_last_words() -> None:
    async with started(program(f"print('loading', flush=True)\n{FOR_EVER}")) as process:
        while "loading" not in process.last_words():
            await asyncio.sleep(0.02)
        with pytest.raises(ServerError, match=r"does not serve after 1 s\. Its last words: loading"):
            await process.until_healthy(answer(False), timeout_seconds=1)


async def test_a_stop_ends_its_own_processes_too() -> None:
    async with started(program(WITH_A_WORKER)) as process:
        worker = await asyncio.to_thread(printed_number, process)
        assert is_alive(worker)
    until(lambda: not is_alive(worker))


async def test_a_server_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True)\n{FOR_EVER}"
    process = await ServerProcess.start("the server", program(deaf, TINSMITH_SUPERVISOR_STOP_SECONDS="0.2"))
    await asyncio.to_thread(printed_number, process)
    await process.stop()
    assert "status 137" in str(await process.ended())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_when_its_parent_is_killed_with_all_its_group(number: signal.Signals) -> None:
    """Its own child processes end as well, without any message."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
    )
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    assert is_alive(worker)
    os.killpg(holder.pid, number)
    holder.wait()
    holder.stdout.close()
    until(lambda: not is_alive(worker))


HOLDER = f"""
import asyncio, sys
from tinsmith_trainer.process.output import configure_logs
from tinsmith_trainer.sampling.token_server.server_process import ServerProcess
from tinsmith_trainer.sampling.token_server.base import ServerCommand

async def hold():
    configure_logs("json", "error")
    process = await ServerProcess.start("the server", ServerCommand([sys.executable, "-c", {WITH_A_WORKER!r}]))
    while process.last_words() == "none":
        await asyncio.sleep(0.02)
    print(process.last_words(), flush=True)
    await asyncio.sleep(600)

asyncio.run(hold())
"""


def printed_number(process: ServerProcess) -> int:
    until(lambda: process.last_words() != "none")
    return int(process.last_words())


def test_nothing_of_a_supervisor_is_left_open() -> None:
    async def whole_life() -> None:
        async with started(program("print('done')")) as process:
            await process.ended()

    gc.collect()  # what other tests left to it
    before = open_files()
    asyncio.run(whole_life())
    assert open_files() <= before


def open_files() -> set[tuple[str, str]]:
    """Each with its number, but for the folder that is looked at."""
    folder = Path("/proc/self/fd")
    numbers = [number for number in os.listdir(folder) if (folder / number).is_symlink()]
    return {(number, os.readlink(folder / number)) for number in numbers}
