"""The logged evaluations of an RL run across restarts; without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tinsmith.training.run_logs.run_log import run_log
from tinsmith.training.runs import rl
from tinsmith.training.runs.config import RlConfig
from tinsmith.training.runs.loop import StopRequest

pytestmark = pytest.mark.pytorch


class Model:
    async def save_weights_and_get_sampling_client(self) -> object:
        return object()


def record(out: Path) -> list[tuple[int, list[str]]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], sorted(line.keys() - {"step"})) for line in lines]


def loop_of(steps_done: int) -> Any:
    """Return a loop with RLTrainer's interface that does this many steps."""

    class Trainer:
        def __init__(self, *_: Any, resumed: Any, on_step: Sequence[Any], logger: Any, **__: Any) -> None:
            self._first = resumed.step if resumed else 0
            self._on_step, self._logger = on_step, logger

        async def run(self, steps: int) -> int:
            for step in range(self._first, steps_done):
                self._logger.log_metrics({"reward": 1.0}, step)
                for follow in self._on_step:
                    await follow(SimpleNamespace(step=step), object())
            return max(self._first, steps_done)

    return Trainer


async def go_on(monkeypatch: pytest.MonkeyPatch, out: Path, resumed_at: int, steps_done: int) -> Any:
    async def evaluate(*_: Any) -> dict[str, float]:
        return {"eval/held_out/reward": 0.5}

    monkeypatch.setattr(rl, "RLTrainer", loop_of(steps_done))
    monkeypatch.setattr(rl._Run, "_evaluate", evaluate)
    resumed = SimpleNamespace(step=resumed_at) if resumed_at else None
    manager = SimpleNamespace(wait=lambda: None, saved_step=None)
    open_run: Any = SimpleNamespace(manager=manager, client=Model(), resumed=resumed, step=resumed_at)
    config = RlConfig(model="tiny", environment="my_games:game", out=out, steps=6, eval_every=2)
    with run_log(out, to=("jsonl",)) as log:
        run = rl._Run(config, open_run, [], log, StopRequest())
        await run.go_on([])
    return run


STEP, EVALUATION = ["reward"], ["eval/held_out/reward"]


async def test_an_evaluation_that_a_kill_left_out_is_made_up_for_and_its_step_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await go_on(monkeypatch, tmp_path, 0, 6)
    undisturbed = record(tmp_path)
    file = tmp_path / "metrics.jsonl"
    killed = file.read_text().splitlines(keepends=True)[: undisturbed.index((2, EVALUATION))]
    file.write_text("".join(killed))
    await go_on(monkeypatch, tmp_path, 2, 6)
    assert record(tmp_path) == undisturbed


async def test_a_run_that_has_ended_early_logs_nothing_when_it_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await go_on(monkeypatch, tmp_path, 0, 3)
    first = record(tmp_path)
    assert first[-2:] == [(3, STEP), (3, EVALUATION)]
    run = await go_on(monkeypatch, tmp_path, 3, 3)
    assert record(tmp_path) == first
    assert run.last == {"eval/held_out/reward": 0.5}, "the summary has it"
