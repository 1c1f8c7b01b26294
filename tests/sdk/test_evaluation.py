"""Evaluations on the real server: beside a run without holding it up, and over what it has saved."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import tinker
from support.client.sdk import adam, next_token_datum
from support.server.serve_process import API_KEY, ServedInstallation
from tinker import types
from tinsmith.training import Answer, CheckpointManager, Example, InlineEvaluator, OfflineEvaluator, Task, load_task
from tinsmith.training.evaluation.loading import TaskOptions
from tinsmith.training.evaluation.sources import in_root, of_base_model

from .conftest import MODEL

PROMPTS = ([5, 9, 2], [11, 3, 8, 1], [4, 4, 13], [2, 10])
DRAWN = types.SamplingParams(max_tokens=6, temperature=1.0)


def small_tokens(_example: Example, answer: Answer) -> float:
    return sum(token < 100 for token in answer.tokens) / len(answer.tokens)


def token_task(grade: Any = small_tokens, name: str = "small") -> Task:
    """Of tokens alone: no tokenizer is looked for."""
    examples = [Example(prompt) for prompt in PROMPTS]
    return Task(name, examples, grade, params=DRAWN, num_samples=2, tokenizer=False)


def train(model: tinker.TrainingClient) -> None:
    model.forward_backward([next_token_datum([5, 9, 2, 14, 7])], "cross_entropy")
    model.optim_step(adam()).result()


def new_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=4, seed=1).result()


def test_steps_are_made_while_an_evaluation_is_held_up(client: tinker.ServiceClient) -> None:
    """And the metrics are logged to the step whose weights they are of."""
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


def test_an_evaluation_beside_the_run_finds_what_one_of_the_same_saved_weights_does(
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


def test_a_file_of_examples_is_a_task(server: ServedInstallation, client: tinker.ServiceClient, tmp_path: Path) -> None:
    """Rendered by the model's own chat template, or as raw text; by text and by logprobs of choices."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(server.models[MODEL])
    rows = [{"prompt": "How much is 1 + 1?", "answer": "2"}, {"prompt": [5, 9, 2], "answer": 7, "id": "tokens"}]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    choices = [{"messages": [{"role": "user", "content": "Hot or cold?"}], "choices": ["hot", "cold"], "answer": 1}]
    (tmp_path / "choices.jsonl").write_text("\n".join(map(json.dumps, choices)))
    short = types.SamplingParams(max_tokens=4, temperature=0.0)
    sums = load_task(tmp_path / "sums.jsonl", TaskOptions(grader="number", params=short, tokenizer=tokenizer))
    either = load_task(tmp_path / "choices.jsonl", TaskOptions(tokenizer=tokenizer))
    sweep = OfflineEvaluator([sums, either], tmp_path / "out", connect=lambda: session(server)).run(
        [of_base_model(MODEL)]
    )
    assert sweep.failures == []
    assert [(one.name, one.estimate.examples) for one in sweep.summaries] == [
        ("sums/score", 2),
        ("choices/acc", 1),
        ("choices/acc_norm", 1),
    ]
