"""Programs by the names of the real ones that start the stand-ins, and stand-ins that run."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from testcluster.ports import free_port
from tinsmith_trainer.sampling.token_server.base import SOCKET_SCHEME, ServerSettings
from tinsmith_trainer.worker.token_server_factory import private_folder
from typing_extensions import override

TESTS = Path(__file__).parents[2]
CALL_SECONDS = 30.0
START_FAILURE = "STAND_IN_FAILS_WITH"
"""A variable with words that vLLM's says, at once, instead of starting."""
STAND_IN = """from tinsmith_trainer.process import gc_pause

with gc_pause():
    from support.token_server.{kind} import main

main()
"""
"""The program of a stand-in, which imports as a worker does."""
FAIL_IF_TOLD = f'if [ -n "${START_FAILURE}" ]; then echo "${START_FAILURE}"; exit 1; fi\n'


def environment_with_look_alikes(folder: Path) -> dict[str, str]:
    """PATH and PYTHONPATH by which `vllm` and `python -m sglang.launch_server` are the stand-ins."""
    programs, packages = folder / "bin", folder / "packages"
    (packages / "sglang").mkdir(parents=True)
    programs.mkdir()
    vllm = programs / "vllm"
    program = STAND_IN.format(kind="vllm")
    vllm.write_text(f"#!/bin/sh\n{FAIL_IF_TOLD}exec {sys.executable} -c '{program}' \"$@\"\n")
    vllm.chmod(0o755)
    (packages / "sglang" / "__init__.py").write_text("")
    (packages / "sglang" / "launch_server.py").write_text(STAND_IN.format(kind="sglang"))
    python_path = os.pathsep.join([str(packages), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": python_path}


@contextmanager
def variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def settings_for(model: Path, max_sequence_length: int, *extra: str) -> ServerSettings:
    return ServerSettings(
        model=model,
        port=free_port(),
        gpus=1,
        max_sequence_length=max_sequence_length,
        max_rank=64,
        max_loaded=16,
        dtype="float32",
        private=private_folder(),
        extra=extra,
    )


class StandInHand:
    """The actions of tests on a running stand-in."""

    def __init__(self, address: str) -> None:
        self._address = address

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop all computing for the block."""
        self._call("/stand-in/hold", b"")
        try:
            yield
        finally:
            self._call("/stand-in/release", b"")

    @contextmanager
    def sick(self) -> Iterator[None]:
        """Make the server unhealthy for the block: it completes nothing."""
        self._call("/stand-in/sicken", b"")
        try:
            yield
        finally:
            self._call("/stand-in/heal", b"")

    def state(self) -> dict[str, Any]:
        """Return how many requests run, and which adapters are loaded."""
        state: dict[str, Any] = json.loads(self._call("/stand-in/state"))
        return state

    def _call(self, path: str, data: bytes | None = None) -> bytes:
        return call(self._address, path, data)


class Refused(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, content: bytes) -> None:
        super().__init__(f"{status}: {content!r}")
        self.status = status
        self.content = content


class _SocketConnection(HTTPConnection):
    """A connection to a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CALL_SECONDS)
        self._path = path

    @override
    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(CALL_SECONDS)
        self.sock.connect(self._path)


def call(address: str, path: str, data: bytes | None = None) -> bytes:
    """Return what a server on this machine answers to a GET, or to a POST of `data`. Raises Refused."""
    place = address.removeprefix(SOCKET_SCHEME)
    port = HTTPConnection(urlsplit(address).netloc, timeout=CALL_SECONDS)
    with closing(port if place == address else _SocketConnection(place)) as connection:
        connection.request("GET" if data is None else "POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
    if response.status != 200:
        raise Refused(response.status, content)
    return content
