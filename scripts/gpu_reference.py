"""Which tests of GPUs ran, on what: docs/gpu-runs.toml as rows of a table."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[1] / "docs" / "gpu-runs.toml"
KEYS = {"name", "needs", "promise", "run"}
RUN_KEYS = {"device", "commit", "date"}


def entries() -> list[dict[str, Any]]:
    """Raises ValueError for a key that means nothing, or a run that does not say all of what, where and when."""
    found: list[dict[str, Any]] = tomllib.loads(RUNS.read_text())["test"]
    for entry in found:
        if unknown := set(entry) - KEYS:
            raise ValueError(f"{entry['name']}: unknown keys {sorted(unknown)}")
        if "run" in entry and set(entry["run"]) != RUN_KEYS:
            raise ValueError(f"{entry['name']}: a run has {sorted(RUN_KEYS)}")
    return found


def run_rows() -> Iterator[tuple[str, ...]]:
    for entry in entries():
        file, _, test = entry["name"].partition("::")
        promise = entry.get("promise", test.removeprefix("test_").replace("_", " "))
        yield f"[{promise}](../{file})", entry["needs"], _run(entry.get("run"))


def _run(run: dict[str, str] | None) -> str:
    return f"run on {run['device']} at commit {run['commit']}, {run['date']}" if run else "not yet run"
