"""One program on every generation of the SDK: all of it works, and with the same numbers to the bit.

`make sdk-environments` installs them. `make test-sdk VERSION=…` asks any other version.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future

import pytest
from package_environment import is_made
from sdk_environments import environment_directory
from sdk_generations import TESTED
from support.client.generations import Life, lives
from support.requirements import InstalledBy, require
from support.server.serve_process import ServedInstallation

from .conftest import MODEL

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
    """The newest first: the others are compared with it."""
    versions = list(dict.fromkeys((NEWEST, *VERSIONS)))
    for version in versions:
        lack = f"tinker {version} is not installed in an environment of its own"
        require(is_made(environment_directory(version)), lack, InstalledBy.SDK_ENVIRONMENTS)
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
