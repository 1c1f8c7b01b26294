"""A local process of `tinsmith serve`, which is started, answers, and is stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

START_SECONDS = 120.0
STOP_SECONDS = 60.0
LOG_LINES_SHOWN = 5


class ServerFailed(Exception):
    """An error for a server that does not start, or does not stop cleanly.

    `str(error)` ends with the last lines of the server's log.
    """


def free_port(preferred: int) -> int:
    """Return the preferred port if it is free. If the preferred port is in use, return another free port."""
    try:
        return _bind(preferred)
    except OSError:
        return _bind(0)


def tinsmith_command() -> list[str]:
    """Return the command that runs this installation, independent of the PATH."""
    return [sys.executable, "-m", "tinsmith"]


@contextmanager
def running_server(
    arguments: Sequence[str], api_key: str, directory: Path, *, start_seconds: float = START_SECONDS
) -> Iterator[str]:
    """Start a server, yield the server's URL when the server answers, and stop the server at the end of the context.

    The server's log is `directory/server.log`.

    Raises ServerFailed if the server does not start, or ends with a status other than 0.
    """
    log = directory / "server.log"
    command = [*tinsmith_command(), "serve", "--port=0", *arguments]
    with log.open("w") as stderr, _start(command, api_key, stderr) as process:
        try:
            yield _wait_for_url(process, log, start_seconds)
        finally:
            process.terminate()
            status = _wait_for_end(process)
    if status != 0:
        raise ServerFailed(f"the server stopped with status {status}. {_last_words(log)}")


def _bind(port: int) -> int:
    with socket.socket() as listener:
        # Servers set this option as well. With it, a port with lingering connections counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return int(listener.getsockname()[1])


def _start(command: Sequence[str], api_key: str, stderr: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env=os.environ | {"TINSMITH_API_KEY": api_key},
    )


def _wait_for_url(process: subprocess.Popen[str], log: Path, start_seconds: float) -> str:
    """Return the URL, which the server prints on standard output.

    A server that does not print the URL in time is killed.
    """
    assert process.stdout is not None
    deadline = threading.Timer(start_seconds, process.kill)
    deadline.start()
    try:
        url = process.stdout.readline().strip()
    finally:
        deadline.cancel()
    if not url:
        raise ServerFailed(f"the server did not start within {start_seconds:g} s. {_last_words(log)}")
    return url


def _wait_for_end(process: subprocess.Popen[str]) -> int:
    try:
        return process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return "\n".join([f"Its log, {log}, ends with:", *lines])
