"""docs/how-to/slime.md sends people to fields and flags that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tinsmith_trainer.options import UsageError, parse_options

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "slime.md").read_text()
PLACE = PAGE.partition("### Flags that say where")[2].partition("\n#")[0]
WORKER = ["--model", "m", "--socket", "s", "--volume", "v", "--checkpoint-root", "file:///c"]
NOT_OF_A_SESSION = {"replicas", "serverArguments", "engine: sglang", "config.json", "engine: miles", "engine: nemo-rl"}


def cells(section: str, column: int) -> Iterator[str]:
    """Yield the code words in a column of a section's table."""
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    for row in rows[1:]:
        yield from re.findall(r"`([^`]+)`", row[column])


def spec_schema(kind: str) -> Any:
    crd = yaml.safe_load((ROOT / "crds" / f"tinsmith.dev_{kind}.yaml").read_text())
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]


@pytest.mark.parametrize("field", sorted(set(cells(PLACE, 1)) - NOT_OF_A_SESSION))
def test_a_field_of_a_session_is_one(field: str) -> None:
    found = spec_schema("trainingsessions")
    for name in field.partition("[")[0].split("."):
        assert name in found["properties"]
        found = found["properties"][name]


@pytest.mark.parametrize("flag", sorted({word for word in cells(PLACE, 2) if word.startswith("--")}))
def test_a_flag_of_the_worker_is_one(flag: str) -> None:
    """Without the value that it asks for argparse complains by its name; of one that it does not know, otherwise."""
    name, *_ = flag.split()
    with pytest.raises(UsageError, match=rf"argument {name}\b"):
        parse_options([*WORKER, name])
