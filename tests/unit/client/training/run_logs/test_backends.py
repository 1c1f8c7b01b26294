"""The real W&B and trackio, offline, in separate processes: a resumed run is one run there."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.requirements import require_environment
from support.waiting import until
from tinsmith.training.run_logs.backends import RunIdentity

pytestmark = pytest.mark.pytorch

CLIENT = Path(__file__).parents[5] / "client"
LIMIT_SECONDS = 100.0
LIVES = (range(1, 4), range(3, 6))
"""The processes of a run: killed after step 3, it resumes from a checkpoint of step 2."""
PROGRAM = """
import sys
# Last: packages of an environment of its own are that one's.
sys.path.insert(0, {client!r})
sys.path.append({packages!r})
from tinsmith.training.run_logs.run_log import run_log
with run_log({directory!r}, project="tests", config={{"rank": 8}}, to=("jsonl", {backend!r})) as log:
{logged}
"""


def run(
    python: Path | str, backend: str, directory: Path, steps: range, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Log a loss for each step."""
    return run_program(
        python, backend, directory, [f'log_metrics({{"loss": {1 / step}}}, {step})' for step in steps], **environment
    )


def run_program(
    python: Path | str, backend: str, directory: Path, calls: Sequence[str], **environment: str
) -> subprocess.CompletedProcess[str]:
    source = PROGRAM.format(
        client=str(CLIENT),
        packages=str(Path(tinker.__file__).parents[1]),
        directory=str(directory),
        backend=backend,
        logged="\n".join(f"    log.{call}" for call in calls),
    )
    # What W&B leaves among the temporary files goes with the test's own.
    place = {"TMPDIR": str(directory.parent), "HOME": str(directory.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [str(python), "-c", source],
        env=os.environ | place | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def test_a_directory_keeps_the_runs_identity(tmp_path: Path) -> None:
    made = RunIdentity.of(tmp_path, None, None)
    assert not made.is_resumed
    assert made.name == f"{tmp_path.name}-{made.run_id}"
    again = RunIdentity.of(tmp_path, "another", "name")
    assert again.is_resumed
    assert (again.run_id, again.project, again.name) == (made.run_id, "tinsmith", made.name)


@pytest.mark.slow("starts the services of others, in processes of their own")
def test_wandb_offline_has_each_step_once_under_one_id_and_leaves_no_process(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    for steps in LIVES:
        done = run(sys.executable, "wandb", tmp_path / "run", steps, WANDB_MODE="offline", TINSMITH_TEST_MARK=mark)
        assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    identity = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [file.stem for file in files] == [f"run-{identity['run_id']}"] * 2
    assert [history for file in files for history in wandb_history(file)] == [(step, 1 / step) for step in range(1, 6)]
    until(lambda: list(processes_marked(mark)) == [])


@pytest.mark.slow("starts the services of others, in processes of their own")
def test_wandb_takes_metrics_of_a_step_that_others_have_passed(tmp_path: Path) -> None:
    """The metrics are those of an evaluation that runs in parallel."""
    calls = [
        "enable_event_steps()",
        *(f'log_metrics({{"loss": {1 / step}}}, {step})' for step in (1, 2)),
        'log_metrics_event({"eval/sums/score": 0.25}, 1, "eval/step")',
        'log_metrics({"loss": 0.25}, 4)',
    ]
    done = run_program(sys.executable, "wandb", tmp_path / "run", calls, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    [file] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    told = [
        (row["training/step"], row.get("loss"), row.get("eval/sums/score"), row.get("eval/step"))
        for row in wandb_rows(file)
    ]
    assert told == [(1, 1.0, None, None), (2, 0.5, None, None), (1, None, 0.25, 1), (4, 0.25, None, None)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[2] == {"step": 1, "eval/sums/score": 0.25}


@pytest.mark.slow("starts the services of others, in processes of their own")
def test_trackio_has_each_step_once_under_one_name(tmp_path: Path) -> None:
    environment = require_environment("third-party")
    for steps in LIVES:
        local = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
        done = run(environment / "bin" / "python", "trackio", tmp_path / "run", steps, **local)
        assert done.returncode == 0, done.stderr
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step").fetchall()
    database.close()
    name = json.loads((tmp_path / "run" / "run.json").read_text())["name"]
    assert [(who, step, json.loads(metrics)) for who, step, metrics in rows] == [
        (name, step, {"loss": 1 / step}) for step in range(1, 6)
    ]


@pytest.mark.slow("starts the services of others, in processes of their own")
def test_wandb_without_a_key_is_refused_at_the_start_with_two_ways_out(tmp_path: Path) -> None:
    done = run(sys.executable, "wandb", tmp_path / "run", range(1, 2), WANDB_MODE="online", WANDB_API_KEY="")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "BackendRefused" in last
    assert "wandb login" in last
    assert "WANDB_MODE=offline" in last


def wandb_history(file: Path) -> list[tuple[int, float]]:
    """Return step and loss of each record."""
    return [(int(row["_step"]), float(row["loss"])) for row in wandb_rows(file)]


def wandb_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the logged rows. The file has LevelDB's log format, after a header of its own."""
    from wandb.proto.wandb_internal_pb2 import Record

    header_bytes, record_header = 7, struct.Struct("<IHB")
    content, at = file.read_bytes(), header_bytes
    assert len(content) < 2**15, "one block"
    while at < len(content):
        _checksum, length, _kind = record_header.unpack_from(content, at)
        at += record_header.size
        record = Record.FromString(content[at : at + length])
        at += length
        if record.WhichOneof("record_type") == "history":
            yield {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}


def processes_marked(mark: str) -> Iterator[str]:
    """Yield the processes that inherited this word in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                yield (process / "cmdline").read_text()
        except OSError:  # it is another's, or has ended
            continue
