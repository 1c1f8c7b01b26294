"""Two tenants of one installation, and the interface of scenarios.

In a scenario, A sends a flood and B sends single requests.
"""

from __future__ import annotations

import itertools
import multiprocessing
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import tinker
from tinsmith.local_server import running_server, tinsmith_command
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from workloads import WORKLOADS

MODEL = "bench/tiny"
SHAPE = WORKLOADS["3M"].shape
OF_A = "tml-benchmark"


@dataclass(frozen=True, slots=True)
class Installation:
    """A server with a worker. A and B are separate tenants."""

    url: str
    key_of_b: str

    @contextmanager
    def session_of_a(self) -> Iterator[tinker.ServiceClient]:
        yield from self._session(OF_A)

    @contextmanager
    def session_of_b(self) -> Iterator[tinker.ServiceClient]:
        yield from self._session(self.key_of_b)

    def _session(self, key: str) -> Iterator[tinker.ServiceClient]:
        service = tinker.ServiceClient(base_url=self.url, api_key=key)
        yield service
        service.close("success").result()


@contextmanager
def two_tenants(scratch: Path) -> Iterator[Installation]:
    model = make_tiny_model(scratch / "model", shape=SHAPE)
    data = scratch / "data"
    made = subprocess.run(
        [*tinsmith_command(), "keys", "create", "b", "--tenant=b", f"--data={data}"],
        check=True,
        capture_output=True,
        text=True,
    )
    arguments = [f"--data={data}", f"--model={MODEL}={model}", "--log-level=warning"]
    with running_server(arguments, OF_A, scratch) as url:
        yield Installation(url, made.stdout.strip())


class Scenario(Protocol):
    """A kind of load."""

    unit: str
    """The unit of A's rate."""

    def flooding(self, installation: Installation) -> AbstractContextManager[Flood]:
        """Return tenant A's flood, which is not started yet."""

    def requesting(self, installation: Installation) -> AbstractContextManager[Callable[[], float]]:
        """Yield a function that sends one request of tenant B and returns the seconds until the answer.

        B stays connected during the block.
        """


class Flood:
    """A flood that keeps a fixed number of requests in flight from a separate thread.

    Each answer triggers the next request.
    """

    def __init__(self, submit: Callable[[], Any], *, on_their_way: int, units_each: int) -> None:
        self._submit = submit
        self._on_their_way = on_their_way
        self._units_each = units_each
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._answers: list[float] = []

    def start(self) -> None:
        """Start the flood. Return after the first answer, when all requests of the flood are in flight."""
        self._stopped.clear()
        self._answers = []
        self._thread = threading.Thread(target=self._run, name="flood")
        self._thread.start()
        while not self._answers and self._thread.is_alive():
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop the flood, and return after all requests of the flood are answered."""
        assert self._thread is not None
        self._stopped.set()
        self._thread.join()

    def answers(self) -> int:
        return len(self._answers)

    def rate(self) -> float:
        """Return the units per second between the first answer and the latest answer."""
        answers = list(self._answers)
        if len(answers) < 2:
            return 0.0
        return (len(answers) - 1) * self._units_each / (answers[-1] - answers[0])

    def _run(self) -> None:
        waiting = deque(self._submit() for _ in range(self._on_their_way))
        for _ in itertools.count():
            waiting.popleft().result()
            self._answers.append(time.perf_counter())
            if self._stopped.is_set():
                break
            waiting.append(self._submit())
        for future in waiting:
            future.result()


class FloodProcess:
    """A's program in a separate process. In B's process, the SDK's work for A's requests would delay B.

    `make` is a function at the top level of a module, so that the new process can import this function.
    """

    def __init__(self, make: Callable[[], Scenario], installation: Installation) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, child_end = spawn.Pipe()
        self._process = spawn.Process(target=_serve_flood, args=(child_end, make, installation))
        self._process.start()
        child_end.close()
        self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()
        self._process.join()

    def wait(self, seconds: float) -> None:
        """Wait at least this number of seconds, and until two more answers have arrived."""
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline or self._ask("answers") < 3:
            time.sleep(0.05)

    def rate(self) -> float:
        return self._ask("rate")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the flood during the block.

        At the start, all requests of the flood are in flight, and at the end, all are answered.
        """
        self._ask("start")
        try:
            yield
        finally:
            self._ask("stop")

    def _ask(self, verb: str) -> Any:
        self._pipe.send(verb)
        return self._pipe.recv()


def _serve_flood(pipe: Connection, make: Callable[[], Scenario], installation: Installation) -> None:
    with make().flooding(installation) as flood:
        pipe.send(None)
        while True:
            try:
                verb = pipe.recv()
            except EOFError:
                return
            pipe.send(getattr(flood, verb)())
