"""The same program on every version of the SDK: every step works, with equal numbers to the bit.

`make sdk-environments` installs them. `make test-sdk VERSION=…` tests any other version.
"""

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

import pytest
from package_environment import is_complete
from sdk_environments import environment_directory
from sdk_generations import TESTED
from support.requirements import InstalledBy, require
from support.server.serve_process import API_KEY, ServedInstallation

from .conftest import MODEL

PROGRAM = Path(__file__).parents[1] / "support" / "client" / "generation_program.py"
PROGRAM_SECONDS = 240.0
AT_ONCE = 2


@dataclass(frozen=True)
class Life:
    """The results of a program's steps, and the step that failed."""

    version: str
    came_to: Mapping[str, Any]
    failed: Mapping[str, str]
    written: str


def live(version: str, server: ServedInstallation, model: str) -> Life:
    """Run the program. Raises subprocess's error for a program that hangs."""
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
    """Run the program on all versions, two at a time, and return the results in order."""
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        yield {version: pool.submit(live, version, server, model) for version in versions}
    finally:
        pool.shutdown(cancel_futures=True)


ASKED_FOR = os.environ.get("TINSMITH_TEST_SDK")
NEWEST = TESTED[-1]
VERSIONS = (ASKED_FOR,) if ASKED_FOR else TESTED
SAME_NUMBERS = ("train", "forward", "custom_loss", "resume", "sample", "prompt_logprobs")
WORKS = {
    "capabilities": True,
    "create": MODEL,
    "save_state": True,
    "load_state": True,
    "save_for_sampler": True,
    "sample_unnamed": 2,
    "top_prompt_logprobs": [0, 3, 3, 3, 3],
    "many_chunks": True,
    "runs": True,
    "checkpoints": ["sampler: sampler_weights/samples", "training: weights/state"],
    "delete": ["sampler: sampler_weights/samples"],
}
# Where the SDK has it.
WORKS_IF_THERE = {"all_checkpoints": True, "sessions": True, "weights_info": 8, "archive": True, "unload": True}
NOT_HERE = "not in this SDK"


@pytest.fixture(scope="module")
def run(server: ServedInstallation) -> Iterator[Mapping[str, Future[Life]]]:
    """Return the newest version's run first; the others are compared with it."""
    versions = list(dict.fromkeys((NEWEST, *VERSIONS)))
    for version in versions:
        lack = f"tinker {version} is not installed in an environment of its own"
        require(is_complete(environment_directory(version)), lack, InstalledBy.SDK_ENVIRONMENTS)
    with lives(versions, server, MODEL) as run:
        yield run


@pytest.mark.parametrize("version", VERSIONS)
def test_a_whole_program_works(run: Mapping[str, Future[Life]], version: str) -> None:
    life = run[version].result()
    assert not life.failed, life.written[-4000:]
    came_to, newest = dict(life.came_to), run[NEWEST].result().came_to
    for step in SAME_NUMBERS:
        assert came_to.pop(step) == newest[step], f"{step} has other numbers than on {NEWEST}"
    for step, expected in WORKS_IF_THERE.items():
        assert came_to.pop(step) in (expected, NOT_HERE), step
    assert came_to == WORKS
