"""What of NeMo RL itself ran on a CPU, how far from the PEFT engine: docs/nemo-rl-runs.toml, written by the run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[1] / "docs" / "nemo-rl-runs.toml"
HEAD = """\
# Written by `make test-nemo-rl`: the last run of each of its tests that passed. `make docs` writes the table of
# docs/nemo-rl.md from it. Differences from the PEFT engine are the largest of a logprob, of the gradient's norm
# (relative), and of a weight after the last step.
"""
KEYS = ("test", "what", "tolerance", "deviation", "commit", "date")
HEADER = ("What", "May differ by", "Differed by", "At commit", "On")


def runs() -> list[dict[str, str]]:
    """Raises ValueError for an entry that does not say all of what, where and when."""
    found: list[dict[str, Any]] = _read()["run"]
    for entry in found:
        if set(entry) != set(KEYS):
            raise ValueError(f"{entry.get('test')}: a run has {', '.join(KEYS)}")
    return found


def pin() -> str:
    """The commit of NeMo RL that all of it ran at."""
    return str(_read()["nemo_rl"])


def _read() -> dict[str, Any]:
    return tomllib.loads(RUNS.read_text())


def rows() -> Iterator[tuple[str, ...]]:
    for run in runs():
        yield run["what"], run["tolerance"], run["deviation"], run["commit"], run["date"]


def note(run: dict[str, str], nemo_rl: str) -> None:
    """In the place of the test's last run; runs of another commit of NeMo RL go."""
    before = runs() if RUNS.exists() and pin() == nemo_rl else []
    kept = [other for other in before if other["test"] != run["test"]]
    write([*kept, run], nemo_rl)


def write(found: list[dict[str, str]], nemo_rl: str) -> None:
    tables = [
        "\n".join(["[[run]]", *(f"{key} = {_quoted(run[key])}" for key in KEYS)])
        for run in sorted(found, key=lambda run: run["test"])
    ]
    RUNS.write_text("\n".join([HEAD + f"nemo_rl = {_quoted(nemo_rl)}\n", "\n\n".join(tables), ""]))


def _quoted(value: str) -> str:
    """JSON's strings are TOML's too."""
    return json.dumps(value, ensure_ascii=False)
