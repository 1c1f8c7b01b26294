"""Each parser takes at most the memory that dev/scripts/parser_memory.py states, for its worst input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from parser_memory import PARSERS

TESTS = Path(__file__).parents[1]
SECONDS = 120


@pytest.fixture(scope="module")
def measured() -> Mapping[str, tuple[int, int]]:
    """Bytes read, and bytes that it took: by a program of its own, whose memory is not that of other tests."""
    command = [sys.executable, "-m", "support.parsers.worst_inputs"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, timeout=SECONDS, check=True)
    found: dict[str, tuple[int, int]] = json.loads(done.stdout)
    return found


def test_each_parser_that_the_table_has_is_measured(measured: Mapping[str, tuple[int, int]]) -> None:
    assert measured.keys() == PARSERS.keys()


@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_takes_no_more_than_the_table_says(name: str, measured: Mapping[str, tuple[int, int]]) -> None:
    read_bytes, taken = measured[name]
    assert taken <= PARSERS[name].most_bytes(read_bytes), f"{taken} bytes for {read_bytes}"
