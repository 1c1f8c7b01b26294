"""`tinsmith serve` as users start it: a process, a URL on its standard output, a data directory that outlives it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from testcluster.ports import free_port

TESTS = Path(__file__).parents[2]
API_KEY = "tml-test-key"
START_SECONDS = 240.0
STOP_SECONDS = 120.0
"""The time for a stop: a third of a minute for its own requests, then a minute for its workers."""
RETRIEVALS = 5
HTTP_OPTIONS: dict[str, Any] = {"trust_env": False, "timeout": 60.0, "verify": False}
"""Certificates are for https alone, and each client would load the public ones: 30 ms of CPU a request."""
REFERENCE_ENGINE = "support.engine.reference:build_reference"
REFERENCE_MODEL = "reference/model"
OF_LOCAL_WORKERS = {"local": {"TINSMITH_DETERMINISTIC_SAMPLING": "true"}}
"""The flags by fleet. TrainingSessions state the same themselves."""


@dataclass(slots=True)
class ServedInstallation:
    """A data directory and the server on it, over any number of lives at one address."""

    data: Path
    models: Mapping[str, Path]
    settings: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables that are no settings."""
    port: int = field(default_factory=free_port)
    program: Sequence[str] = (str(Path(sys.executable).with_name("tinsmith")), "serve")
    process: subprocess.Popen[str] | None = None
    temporary: Path | None = None
    """The folder of one life's temporary files, which a killed one leaves. Its path is short, for sockets."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> ServedInstallation:
        """Start the server, and wait until it has printed its URL: from then on it answers."""
        models = [flag for name, path in self.models.items() for flag in ("--model", f"{name}={path}")]
        command = [*self.program, "--port", str(self.port), *models]
        self.temporary = Path(tempfile.mkdtemp(prefix="serve-"))
        settings = {f"TINSMITH_{name.upper()}": value for name, value in self.settings.items()}
        environment = {
            **os.environ,
            "PYTHONPATH": str(TESTS),
            "TMPDIR": str(self.temporary),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TINSMITH_DATA": str(self.data),
            "TINSMITH_API_KEY": API_KEY,
            "TINSMITH_LOG_LEVEL": "warning",
            **OF_LOCAL_WORKERS.get(self.settings.get("fleet", "local"), {}),
            **settings,
            **self.variables,
        }
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line == self.url, f"the server printed {line!r}"
        return self

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        if self.process is None:
            return 0
        self.process.send_signal(number)
        code = self.process.wait(STOP_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process = None
        if self.temporary is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
        return code

    def worker_pids(self) -> list[int]:
        """Return the processes that this server started."""
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def kill_workers(self) -> None:
        for pid in self.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", headers={"X-API-Key": API_KEY}, **HTTP_OPTIONS)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers={"X-API-Key": API_KEY}, **HTTP_OPTIONS)

    def retrieve(self, request_id: str) -> httpx.Response:
        """Retrieve a result as the SDK does: 408 means that the worker is starting, and the request is repeated."""
        for _ in range(RETRIEVALS):
            answer = self.post("/api/v1/retrieve_future", {"request_id": request_id, "allow_metadata_only": False})
            if answer.status_code != httpx.codes.REQUEST_TIMEOUT:
                break
        return answer

    def metric(self, name: str) -> float:
        """Return the sum over a metric's series on /metrics."""
        lines = httpx.get(f"{self.url}/metrics", **HTTP_OPTIONS).text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(values)


def highest_bytes(pid: int) -> int:
    """Return the peak memory of a process in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
