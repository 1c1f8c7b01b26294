"""`make gpu-wheels`: what a machine without network is brought, and no more than it takes."""

from __future__ import annotations

import re
from pathlib import Path

import gpu_wheels
import pytest
from commits import CannotRun

PINNED = re.compile(r"^([a-z0-9-]+)==([^ ]+)", re.M)


def pinned_in(lock: str) -> dict[str, str]:
    return dict(PINNED.findall((gpu_wheels.ROOT / "dev" / "requirements" / lock).read_text()))


def test_the_wheels_have_the_versions_that_the_tests_are_run_with() -> None:
    tests, wheels = pinned_in("dev.txt"), pinned_in(gpu_wheels.LOCK.name)
    assert wheels
    assert wheels == {name: tests[name] for name in wheels}


def test_more_than_may_travel_is_an_error_that_says_what_to_take_away(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    wheel.write_bytes(bytes(gpu_wheels.MIB))
    with pytest.raises(CannotRun, match="64 MiB that may travel: take a package"):
        gpu_wheels.instructions([wheel], gpu_wheels.MOST_BYTES, "0123abc")
