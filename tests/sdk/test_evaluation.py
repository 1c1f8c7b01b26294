"""Evaluations on the real server: during a run without delaying it, and over its checkpoints."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.client.page_programs import PLACE_OF_MODEL, page_program
from support.client.sdk import adam, next_token_datum
from support.server.serve_process import API_KEY, ServedInstallation
from support.waiting import until
from tinker import types
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinsmith.cli import main
from tinsmith.training import (
    Answer,
    CheckpointManager,
    Example,
    InlineEvaluator,
    OfflineEvaluator,
    Retention,
    Task,
)
from tinsmith.training.evaluation.loading import find_tasks
from tinsmith.training.evaluation.results import read_rows
from tinsmith.training.evaluation.sources import at_path, in_root

from .conftest import MODEL

TINY = "tiny/other-name"
PROMPTS = ([5, 9, 2], [11, 3, 8, 1], [4, 4, 13], [2, 10])
HELD_OUT = [next_token_datum([5, 9, 2, 14, 7])]
DRAWN = types.SamplingParams(max_tokens=6, temperature=1.0)


def small_tokens(_example: Example, answer: Answer) -> float:
    return sum(token < 100 for token in answer.tokens) / len(answer.tokens)


def token_task(grade: Any = small_tokens, name: str = "small") -> Task:
    """Return a task on tokens, which needs no tokenizer."""
    examples = [Example(prompt) for prompt in PROMPTS]
    return Task(name, examples, grade, params=DRAWN, num_samples=2, tokenizer=False)


def train(model: tinker.TrainingClient) -> None:
    model.forward_backward([next_token_datum([5, 9, 2, 14, 7])], "cross_entropy")
    model.optim_step(adam()).result()


def new_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4, seed=1).result()


def test_steps_are_made_while_an_evaluation_is_held_up(client: tinker.ServiceClient) -> None:
    """Metrics are logged for the step whose weights they evaluate."""
    release, model = threading.Event(), new_model(client)

    def held_up(example: Example, answer: Answer) -> float:
        assert release.wait(60)
        return small_tokens(example, answer)

    with InlineEvaluator([token_task(held_up)], every=2) as evaluator:
        started = []
        for step in range(1, 6):
            train(model)
            started.append(evaluator.maybe_evaluate(model, step))
        assert started == [False, True, False, False, False]
        assert (evaluator.skipped, evaluator.finished) == ([4], [])
        release.set()
        evaluator.wait()
    assert [(one.step, one.failures, [*one.metrics]) for one in evaluator.finished] == [(2, {}, ["eval/small/score"])]


def test_an_evaluation_during_the_run_has_the_results_of_the_same_saved_weights(
    server: ServedInstallation, client: tinker.ServiceClient, tmp_path: Path
) -> None:
    model = new_model(client)
    with (
        CheckpointManager(tmp_path / "run", client, config={}, adapter=False, tokenizer=False) as manager,
        InlineEvaluator([token_task()], every=1, waiting=2) as evaluator,
    ):
        for step in (1, 2):
            train(model)
            manager.save(model, step, loop_state={})
            assert evaluator.maybe_evaluate(model, step)
    offline = OfflineEvaluator([token_task()], tmp_path / "evaluation", connect=lambda: session(server))
    sweep = offline.run(in_root(str(tmp_path / "run")))
    found = {one.step: one.estimate.mean for one in sweep.summaries}
    assert found == {one.step: one.metrics["eval/small/score"] for one in evaluator.finished}
    assert found[1] != found[2]
    assert (tmp_path / "evaluation" / "curves.png").stat().st_size > 1000


def session(server: ServedInstallation) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=server.url, api_key=API_KEY)


KILLED_TASKS = """
import json, os, time
from tinker import types
from tinsmith.training import Example, Task

def grade(example, answer):
    with open("asked.jsonl", "a") as asked:
        asked.write(json.dumps([example.id, list(answer.tokens)]) + "\\n")
    time.sleep(float(os.environ.get("GRADE_SECONDS", "0")))
    return sum(token < 100 for token in answer.tokens) / len(answer.tokens)

drawn = types.SamplingParams(max_tokens=4, temperature=1.0)
small = Task("small", [Example([number, 5]) for number in range(10)], grade, params=drawn, tokenizer=False)
"""


def test_a_killed_sweep_resumes(
    server: ServedInstallation, client: tinker.ServiceClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The results equal those of an undisturbed sweep, and only samples in flight are repeated."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "killed_tasks.py").write_text(KILLED_TASKS)
    model, paths = new_model(client), []
    for step in (1, 2):
        train(model)
        paths.append(model.save_weights_for_sampler(f"step-{step}").result().path)
    words = [*("eval", "killed_tasks:small", "--concurrency", "2", "--out", "killed")]
    kill_when_half_done(server, tmp_path, [*words, *(f"--path={path}" for path in paths)])
    tasks, checkpoints = find_tasks("killed_tasks:small"), list(map(at_path, paths))
    again = OfflineEvaluator(tasks, "killed", connect=lambda: session(server)).run(checkpoints)
    assert 20 <= len((tmp_path / "asked.jsonl").read_text().splitlines()) <= 20 + 2
    undisturbed = OfflineEvaluator(tasks, "undisturbed", connect=lambda: session(server)).run(checkpoints)
    assert [one.estimate.examples for one in again.summaries] == [10, 10]
    assert again.summaries == undisturbed.summaries
    found = [sorted(map(repr, read_rows(tmp_path / name))) for name in ("undisturbed", "killed")]
    assert found[0] == found[1]


def kill_when_half_done(server: ServedInstallation, folder: Path, words: list[str]) -> None:
    environment = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY, "GRADE_SECONDS": "0.1"}
    command = [sys.executable, "-m", "tinsmith", *words]
    process = subprocess.Popen(command, cwd=folder, env=os.environ | environment, stderr=subprocess.DEVNULL)
    results = folder / "killed" / "results.jsonl"
    until(lambda: results.exists() and results.read_bytes().count(b"\n") >= 7)
    process.kill()
    process.wait()
    assert results.read_bytes().count(b"\n") < 20


def test_the_command_takes_all_that_a_server_has_of_a_run(
    server: ServedInstallation,
    client: tinker.ServiceClient,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A sampler replaces the state of the same name, a base model is included, and deleted states are skipped."""
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    (tmp_path / "few.jsonl").write_text('{"prompt": [5, 9, 2], "answer": 7}')
    model = new_model(client)
    train(model)
    model.save_state("000001").result()
    model.save_weights_for_sampler("000001").result()
    train(model)
    model.save_state("000002").result()
    words = [*("eval", str(tmp_path / "few.jsonl"), "--run", model.model_id, "--model", MODEL)]
    words += [*("--path", f"tinker://{model.model_id}/weights/gone", "--tokenizer", str(server.models[MODEL]))]
    words += [*("--max-tokens", "2", "--out", str(tmp_path / "out"), "--base-url", server.url)]
    rest = tinker.RestClient(base_url=server.url, api_key=API_KEY)
    runs_before = rest.list_training_runs().result()
    with pytest.raises(SystemExit) as end:
        main(words)
    said = capsys.readouterr()
    assert end.value.code in (None, 0), said.err
    runs_after = rest.list_training_runs().result()
    assert runs_after.cursor.total_count == runs_before.cursor.total_count, "an evaluation is no run of its own"
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        [MODEL, "few/score"],
        ["000001", "1"],
        ["000002", "2"],
    ]
    assert f"skipped: the server has no tinker://{model.model_id}/weights/gone" in said.err
    left = {one.tinker_path.rpartition("/")[2] for one in rest.list_checkpoints(model.model_id).result().checkpoints}
    assert left == {"000001", "000002"}


def test_the_best_checkpoint_by_an_evaluation_stays(client: tinker.ServiceClient, tmp_path: Path) -> None:
    """Losses on held-out data, by the training client and by the cookbook's evaluator, are of the same weights."""
    from tinker_cookbook.supervised.nll_evaluator import SamplerNLLEvaluator

    worth = {1: 0.2, 2: 0.9, 3: 0.1}
    steps = iter(worth)
    graded = Task("worth", [Example([5])], lambda *_: worth[next(steps)], params=DRAWN, tokenizer=False)
    model, losses = new_model(client), [HeldOutLoss(), SamplerNLLEvaluator(HELD_OUT, "sampled")]
    rules = Retention(keep_last=1, keep_best=1, metric="eval/worth/score", mode="max")
    with CheckpointManager(tmp_path, client, config={}, adapter=False, tokenizer=False, retention=rules) as manager:
        evaluator = InlineEvaluator(
            [graded, *losses], every=1, on_result=lambda one: manager.add_metrics(one.step, one.metrics)
        )
        with evaluator:
            for step in worth:
                train(model)
                manager.save(model, step, loop_state={})
                evaluator.maybe_evaluate(model, step)
                evaluator.wait()
        manager.save(model, 4, loop_state={})
    assert manager.store.steps() == [2, 4]
    found = [[one.metrics[f"eval/{name}/nll"] for one in evaluator.finished] for name in ("HeldOutLoss", "sampled")]
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    assert found[0][0] > found[0][1] > found[0][2]


class HeldOutLoss(TrainingClientEvaluator):
    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        done = await training_client.forward(HELD_OUT, "cross_entropy")
        return {"nll": done.metrics["loss:sum"] / 4}


def output_of(server: ServedInstallation, folder: Path, source: str) -> list[str]:
    """Run a program in a folder in which a relative path leads to the model and its tokenizer."""
    source = source.replace(PLACE_OF_MODEL, f'"{TINY}"')
    (folder / "tiny").mkdir()
    (folder / TINY).symlink_to(server.models[TINY])
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_task_of_the_page_runs_at_every_checkpoint(
    server: ServedInstallation, client: tinker.ServiceClient, tmp_path: Path
) -> None:
    model = client.create_lora_training_client(TINY, rank=4).result()
    with CheckpointManager(tmp_path / "checkpoints", client, config={}, adapter=False, tokenizer=False) as manager:
        manager.save(model, 2, loop_state={})
        manager.save(model, 4, loop_state={})
    lines = output_of(server, tmp_path, page_program("OfflineEvaluator(", of_a_model=False))
    assert [line.split()[:2] for line in lines] == [["2", "sums/score"], ["4", "sums/score"]]
    assert len(list(read_rows(tmp_path / "evaluation"))) == 40


def test_the_program_of_the_page_sees_its_model_learn(server: ServedInstallation, tmp_path: Path) -> None:
    lines = output_of(server, tmp_path, page_program("InlineEvaluator("))
    steps = [ast.literal_eval(line[line.index("{") : line.index("}") + 1]) for line in lines]
    assert [line.split()[0] for line in lines] == ["0", "4", "8", "12"]
    assert steps[0]["eval/learnt/score"] < 0.5 < steps[-1]["eval/learnt/score"]
