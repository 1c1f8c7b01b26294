"""The messages that a program's user reads when a server cannot do what was requested."""

from __future__ import annotations

import logging
import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from support.client.sdk import service_client
from support.server.serve_process import API_KEY, ServedInstallation
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model
from typing_extensions import override

MODEL = "tiny/model"
FULL = {"engine_flags": f"--reserved-bytes={2**60}", "poll_hold_seconds": "1"}
"""The worker's view of a full volume: less is free than its reserve."""


@contextmanager
def served(folder: Path, shape: TinyShape | None = None, **settings: str) -> Iterator[ServedInstallation]:
    model = make_tiny_model(folder / "model", shape=shape)
    installation = ServedInstallation(folder / "data", {MODEL: model}, settings)
    installation.start()
    try:
        yield installation
    finally:
        installation.stop()


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[ServedInstallation]:
    """Return a server whose model has sound files and a forward pass that raises: three key heads do not fit four."""
    with served(tmp_path, TinyShape(kv_heads=3)) as server:
        yield server


def test_a_model_that_no_engine_can_run_fails_its_client_with_the_reason(broken: ServedInstallation) -> None:
    with service_client(broken) as service, pytest.raises(tinker.RequestFailedError) as failed:
        service.create_lora_training_client(MODEL, rank=4).result()
    assert f"{MODEL} cannot be served: The engine peft cannot load" in str(failed.value)
    assert "RuntimeError: The size of tensor" in str(failed.value)


def test_a_program_that_starts_on_a_full_volume_says_so(tmp_path: Path) -> None:
    program = (
        "import sys, tinker\n"
        "service = tinker.ServiceClient(base_url=sys.argv[1])\n"
        f"service.create_lora_training_client({MODEL!r}, rank=4).result()\n"
    )
    environment = os.environ | {"TINKER_API_KEY": API_KEY}
    with served(tmp_path, **FULL) as server:
        command = [sys.executable, "-c", program, server.url]
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            try:
                message = next(line for line in process.stderr if "waiting: " in line and "loading" not in line)
            finally:
                process.kill()
    assert "is full: make room, then retry. Nothing was accepted." in message


class SdkLog(logging.Handler):
    """The messages that the SDK logs, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.Queue[str] = queue.Queue()

    @override
    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put(record.getMessage())

    def until(self, part: str, timeout_seconds: float = 60.0) -> str:
        while part not in (line := self.lines.get(timeout=timeout_seconds)):
            pass
        return line


@pytest.fixture
def sdk_log() -> Iterator[SdkLog]:
    handler, logger = SdkLog(), logging.getLogger("tinker")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.timeout(300)
def test_a_waiting_program_shows_the_reason_and_continues_when_a_session_ends(tmp_path: Path, sdk_log: SdkLog) -> None:
    with served(tmp_path, adapter_slots="1", model_places="1") as server, service_client(server) as waiting:
        with service_client(server) as holding:
            held = holding.create_lora_training_client(MODEL, rank=4).result()
            made = waiting.create_lora_training_client(MODEL, rank=4)
            line = sdk_log.until("waiting: waiting for")
            session_id = held.get_info().model_id.split(":", maxsplit=1)[0]
            assert f"one of 1 places of {MODEL}; 1 held by your session {session_id}, idle for " in line
            assert "wait for a session to end, or restart the server with more model_places" in line
        assert made.result().get_info().model_id
