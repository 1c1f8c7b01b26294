"""The commands in docs/ name engines and flags that there are."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from tinsmith_trainer.parity.sides import options_of, parse_choice

DOCS = Path(__file__).parents[4] / "docs"
COMMAND = re.compile(r"^tinsmith parity (.+)$", re.MULTILINE)
COMMANDS = sorted({command for page in DOCS.rglob("*.md") for command in COMMAND.findall(page.read_text())})


def test_there_are_examples() -> None:
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("command", COMMANDS)
def test_an_examples_engines_are_those_of_a_worker_with_its_flags(command: str) -> None:
    words = shlex.split(command, comments=True)
    engines = [following for word, following in pairwise(words) if word == "--engine"]
    assert len(engines) >= 2
    for engine in engines:
        options_of(parse_choice(engine), model="m", rank=8)
