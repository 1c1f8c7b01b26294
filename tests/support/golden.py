"""Whole objects kept as files, so that a review shows the real YAML. `make golden` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

WRITES = os.environ.get("TINSMITH_GOLDEN") == "write"


class _Plain(yaml.SafeDumper):
    """Without anchors, which nobody writes by hand."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def assert_golden(file: Path, documents: list[dict[str, Any]]) -> None:
    """The documents are those of the file. With TINSMITH_GOLDEN=write, they become it."""
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)
    if WRITES:
        file.write_text(text)
    assert file.exists(), f"{file.name} is not there: `make golden` writes it"
    assert text == file.read_text(), (
        f"{file.name} is not what is built; if the change is meant, `make golden` writes it"
    )
