"""The recorded runs of tests and benchmarks on GPUs, from docs/gpu-runs.toml, and the rows for tables."""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RUNS = Path(__file__).parents[2] / "docs" / "gpu-runs.toml"
KEYS = {"name", "needs", "promise", "run"}
RUN_KEYS = {"device", "commit", "date"}
BENCHMARK_KEYS = {"model", "dtype", "shape", "engine", "ratio", "peak_gb", "samples", "run"}
CALLS_KEYS = {"model", "name", "ms", "rate", "run"}
TABLES = {"test": KEYS, "benchmark": BENCHMARK_KEYS, "calls": CALLS_KEYS}

HEAD = """\
# An entry for each GPU test with its last run, then the measurements. `make gpu-run` writes both, and `make docs`
# writes docs/how-to/gpu.md from them. A test compares the entries with the existing tests.
"""


def entries(table: str = "test") -> list[dict[str, Any]]:
    """Return the entries of the tests, of the benchmark of steps, or of that of calls.

    Raises ValueError for an unknown key, and for a run without a subject, place or time.
    """
    found: list[dict[str, Any]] = tomllib.loads(RUNS.read_text()).get(table, [])
    for entry in found:
        _check(entry, TABLES[table])
    return found


def _check(entry: Mapping[str, Any], keys: set[str]) -> None:
    name = entry.get("name") or entry.get("model")
    if unknown := set(entry) - keys:
        raise ValueError(f"{name}: unknown keys {sorted(unknown)}")
    if "run" in entry and set(entry["run"]) - {"failed"} != RUN_KEYS:
        raise ValueError(f"{name}: a run has {sorted(RUN_KEYS)}, and what failed if it did")


def write(
    tests: Sequence[Mapping[str, Any]],
    benchmarks: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]] = (),
    file: Path | None = None,
) -> None:
    """Replace the file. The default is docs/gpu-runs.toml."""
    tables = zip(TABLES, (tests, benchmarks, calls), strict=True)
    blocks = [_block(table, entry) for table, listed in tables for entry in listed]
    (file or RUNS).write_text("\n".join([HEAD, *blocks]))


def _block(table: str, entry: Mapping[str, Any]) -> str:
    return "".join([f"[[{table}]]\n", *(f"{key} = {_value(value)}\n" for key, value in entry.items())])


def _value(value: object) -> str:
    """Return a string, a number, or a table of strings and numbers as TOML.

    JSON strings are valid in TOML.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)


def run_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each test that ran, and one row for the tests of a file that did not."""
    for (file, needs, run), group in itertools.groupby(entries(), _row_key):
        yield f"[{'; '.join(_promises(file, list(group)))}](../../{file})", needs, run


def _row_key(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    file = entry["name"].partition("::")[0]
    return file, entry["needs"], _run(entry.get("run"))


def _promises(file: str, group: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    if "run" not in group[0] and len(group) > 1:
        return [f"{len(group)} tests of {Path(file).stem.removeprefix('test_').replace('_', ' ')}"]
    named = (entry["name"].partition("::")[2].removeprefix("test_").replace("_", " ") for entry in group)
    return [entry.get("promise", name) for entry, name in zip(group, named, strict=True)]


def benchmark_rows() -> Iterator[tuple[str, ...]]:
    measured = entries("benchmark")
    if not measured:
        yield "not measured yet", "", "", "", "", ""
    for entry in measured:
        yield (
            f"{entry['model']} in {entry['dtype']}, {entry['shape']}",
            f"{entry['engine']:,.0f}",
            f"{entry['ratio']:.2f}",
            f"{entry['peak_gb']:.1f} GB",
            f"{entry['samples']:,.0f}",
            _run(entry["run"]),
        )


def calls_rows() -> Iterator[tuple[str, ...]]:
    measured = entries("calls")
    if not measured:
        yield "not measured yet", "", "", ""
    for entry in measured:
        yield f"{entry['model']}: {entry['name']}", f"{entry['ms']:,.1f} ms", f"{entry['rate']:,}", _run(entry["run"])


def _run(run: dict[str, str] | None) -> str:
    if run is None:
        return "not yet run"
    place = f"{run['device'].removeprefix('NVIDIA ')}, {run['commit']}"
    return f"**failed**: {place}" if "failed" in run else place
