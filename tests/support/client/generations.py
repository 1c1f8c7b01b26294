"""Whole programs on SDKs of other generations, each in an environment of its own: `generation_program.py`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sdk_environments import environment_directory
from support.server.serve_process import API_KEY, ServedInstallation

PROGRAM = Path(__file__).with_name("generation_program.py")
PROGRAM_SECONDS = 240.0
AT_ONCE = 2


@dataclass(frozen=True)
class Life:
    """What each step of a program came to, and the one at which it failed."""

    version: str
    came_to: Mapping[str, Any]
    failed: Mapping[str, str]
    written: str


def live(version: str, server: ServedInstallation, model: str) -> Life:
    """Raises what subprocess raises for a program that hangs."""
    python = environment_directory(version) / "bin" / "python"
    # Telemetry is another program's business, and no tokenizer is looked for.
    environment = {**os.environ, "PYTHONPATH": "", "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [python, PROGRAM, server.url, API_KEY, model],
        env=environment,
        timeout=PROGRAM_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    if not ran.stdout.strip():
        return Life(version, {}, {"step": "the first", "error": "it said nothing"}, ran.stderr)
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["sdk"] == version
    return Life(version, said["came_to"], said["failed"], ran.stderr)


@contextmanager
def lives(versions: Sequence[str], server: ServedInstallation, model: str) -> Iterator[Mapping[str, Future[Life]]]:
    """All of them, two at a time, in this order."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield {version: pool.submit(live, version, server, model) for version in versions}
    finally:
        pool.shutdown(cancel_futures=True)
