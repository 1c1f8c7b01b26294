"""`tinsmith runs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from support.client.stub_server import GOOD_KEY, Answer, stub_server
from tinsmith import runs
from tinsmith.cli import main

RUN = {"training_run_id": "s:train:0", "base_model": "org/tiny", "state": "ready"}
PROGRESS = {"step": 7, "loss": 1.23456, "tokens_per_second": 1234.5, "total_steps": 64, "eta_seconds": 65.0}
SERIES = "/api/v1/training_runs/s%3Atrain%3A0/metrics?after={}&after_reported={}&limit=10000"


def step(number: int) -> Mapping[str, Any]:
    return {"position": number, "step": number, "time": f"2026-01-01T00:00:0{number}Z", "steps": 1, "loss": 0.5}


def report(number: int) -> Mapping[str, Any]:
    return {"revision": 1, "step": number, "time": f"2026-01-01T00:00:0{number}.5Z", "values": {"reward": 0.25}}


def part(*steps: Mapping[str, Any], reported: list[Mapping[str, Any]], after: int, more: bool = False) -> Answer:
    return 200, {"steps": steps, "reported": reported, "after": after, "after_reported": 0, "more": more}


@pytest.fixture(autouse=True)
def good_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", GOOD_KEY)
    monkeypatch.setenv("COLUMNS", "100")


def printed(answers: Mapping[str, Answer], *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with stub_server(answers) as url, pytest.raises(SystemExit) as end:
        main(["runs", "--base-url", url, *arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_runs_are_listed_with_progress_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    waiting = RUN | {"training_run_id": "w:train:0", "state": "waiting", "queue_position": 2}
    answers = {"/api/v1/training_runs?limit=20": (200, {"training_runs": [RUN | {"progress": PROGRESS}, waiting]})}
    _, ready, queued = printed(answers, capsys=capsys).splitlines()
    assert ready.split() == ["s:train:0", "org/tiny", "ready", "7", "of", "64", "1.235", "1,234", "1:05"]
    assert queued.split() == ["w:train:0", "org/tiny", "waiting,", "place", "2", "0"]


def test_a_narrow_terminal_does_not_cut_the_id_of_a_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    run = RUN | {"training_run_id": f"sess-{'0' * 32}:train:0"}
    answers = {"/api/v1/training_runs?limit=20": (200, {"training_runs": [run | {"progress": PROGRESS}]})}
    assert run["training_run_id"] in printed(answers, capsys=capsys)


def test_the_newest_steps_of_a_run_are_printed_with_what_the_program_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers = {
        "/api/v1/training_runs/s%3Atrain%3A0": (200, RUN),
        SERIES.format(0, 0): part(step(1), step(2), reported=[report(1)], after=2, more=True),
        SERIES.format(2, 0): part(step(3), reported=[], after=3),
    }
    path = "tinker://s:train:0/weights/a"
    assert printed(answers, path, "--limit", "3", capsys=capsys).splitlines() == [
        "step 1  reward 0.25",
        "step 2  loss 0.5",
        "step 3  loss 0.5",
    ]
    shown = printed(answers, path, "--limit", "1", "--json", capsys=capsys)
    assert json.loads(shown) == step(3)


def test_follow_prints_new_steps_until_the_run_has_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step may arrive after the end. A server that fails between two parts loses no step."""
    answers: dict[str, Answer] = {
        "/api/v1/training_runs/s%3Atrain%3A0": (200, RUN),
        SERIES.format(0, 0): part(step(1), reported=[], after=1),
        SERIES.format(1, 0): part(reported=[], after=1),
        SERIES.format(2, 0): (503, {"detail": "the store does not answer"}),
    }
    changes = iter(
        [
            {SERIES.format(1, 0): part(step(2), reported=[], after=2, more=True)},
            {SERIES.format(2, 0): part(reported=[], after=2)},
            {"/api/v1/training_runs/s%3Atrain%3A0": (200, RUN | {"state": "released"})},
            {SERIES.format(2, 0): part(step(3), reported=[], after=3), SERIES.format(3, 0): part(reported=[], after=3)},
        ]
    )
    monkeypatch.setattr(runs.time, "sleep", lambda _: answers.update(next(changes, {})))
    with stub_server(answers) as url, pytest.raises(SystemExit):
        main(["runs", "--base-url", url, "s:train:0", "--follow"])
    shown = capsys.readouterr()
    assert shown.err.count("the store does not answer; trying again until the server answers") == 1
    lines = shown.out.splitlines()
    assert lines == ["step 1  loss 0.5", "step 2  loss 0.5", "step 3  loss 0.5"]


def test_only_a_named_run_can_be_followed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["runs", "--follow"])
    assert end.value.code == 2
    assert "name the RUN to follow" in capsys.readouterr().err
