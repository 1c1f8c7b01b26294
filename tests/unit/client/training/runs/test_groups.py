"""Environments of a run: their origin, the grading of answers, and the errors for wrong names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.types import EnvGroupBuilder
from tinsmith.training.errors import BadConfig, BadData
from tinsmith.training.evaluation.examples import GRADERS, Answer, Example
from tinsmith.training.runs.config import RlConfig
from tinsmith.training.runs.groups import Prompts, grader, make_groups, read_prompts

pytestmark = pytest.mark.pytorch


class Letters:
    """A tokenizer with one token for each character."""

    name_or_path = "letters"
    bos_token = eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(map(ord, text))

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def config(**fields: Any) -> RlConfig:
    return RlConfig(model="demo/tiny", **fields)


def examples_of(groups: Sequence[EnvGroupBuilder]) -> list[Any]:
    return [group.example for group in groups]  # type: ignore[attr-defined]


@pytest.mark.parametrize("environment", ["guessing:environment", "forecaster:environment"])
def test_example_environments_hold_out_others_than_they_train_on(environment: str) -> None:
    train, held_out = make_groups(config(environment=environment, groups=20, eval_groups=20), Prompts(), None)
    again, _ = make_groups(config(environment=environment, groups=20, eval_groups=20), Prompts(), None)
    assert len(train) == len(held_out) == 20
    assert examples_of(train) == examples_of(again)
    assert examples_of(train) != examples_of(held_out)
    assert make_groups(config(environment=environment, eval_groups=0), Prompts(), None)[1] == []


def test_a_function_of_the_user_is_found_where_the_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_games.py").write_text(
        "from tinsmith.training import from_functions\n"
        "def game(*, renderer, group_size, count, seed):\n"
        "    numbers = [seed + number for number in range(count)]\n"
        "    return from_functions(numbers, lambda _: [7], lambda *_: 1.0, group_size=group_size, renderer=renderer)\n"
        "def nothing(**given):\n"
        "    return []\n"
    )
    monkeypatch.chdir(tmp_path)
    train, held_out = make_groups(config(environment="my_games:game", groups=3, eval_groups=2), Prompts(), None)
    assert (len(train), len(held_out)) == (3, 2)
    with pytest.raises(BadConfig, match="my_games:nothing must return a list of one or more Env"):
        make_groups(config(environment="my_games:nothing"), Prompts(), None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("chess", "environment is 'chess': it must be jsonl or module:function"),
        ("no_such_module:f", "environment is 'no_such_module:f': No module named 'no_such_module'"),
        ("json:f", "environment is 'json:f': module 'json' has no attribute 'f'"),
    ],
)
def test_an_unknown_environment_is_reported(name: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        make_groups(config(environment=name), Prompts(), None)


@pytest.mark.parametrize(
    ("name", "text", "answer", "reward"),
    [
        ("exact", " a\n", "a", 1.0),
        ("exact", "a b", "a", 0.0),
        ("contains", "So: PARIS.", "Paris", 1.0),
        ("contains", "so", "a", 0.0),
        ("number", "3, or 1,200", "1200", 1.0),
        ("number", "12", "1", 0.0),
        ("number", r"so \boxed{4}, and not 5", "4", 1.0),
        ("number", "10-5", "5", 1.0),
        ("number", "1e3", "1000", 1.0),
        ("number", "none", "1", 0.0),
    ],
)
def test_a_reward_equals_the_score_of_the_same_grader(name: str, text: str, answer: str, reward: float) -> None:
    assert grader(name)(text, answer) == reward == GRADERS[name](Example("?", answer), Answer(text))


def test_prompts_are_split_or_held_out_in_a_file_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": n}) + "\n" for n in range(10)))
    prompts = read_prompts(config(environment="jsonl", data=file, eval_groups=3))
    assert (len(prompts.train), len(prompts.held_out)) == (7, 3)
    assert {one.location for one in prompts.train}.isdisjoint(one.location for one in prompts.held_out)
    apart = read_prompts(config(environment="jsonl", data=file, eval_data=file, eval_groups=4))
    assert (len(apart.train), len(apart.held_out)) == (10, 4)
    assert read_prompts(config(environment="guessing:environment")) == Prompts()


async def test_an_environment_of_prompts_rewards_the_expected_answer(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+0?", "answer": n}) + "\n" for n in range(10)))
    settings = config(environment="jsonl", data=file, eval_groups=3, grader="number", group_size=2)
    renderer = get_renderer("role_colon", cast(Any, Letters()))
    train, held_out = make_groups(settings, read_prompts(settings), renderer)
    assert (len(train), len(held_out)) == (7, 3)
    right, wrong = await held_out[0].make_envs()
    observed = [await environment.initial_observation() for environment in (right, wrong)]
    number = "".join(map(chr, observed[0][0].to_ints())).partition("+")[0][-1]
    assert (await right.step(list(map(ord, f" {number}\n\nUser:")))).reward == 1.0
    assert (await wrong.step(list(map(ord, " 11\n\nUser:")))).reward == 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"environment": "jsonl"}, "environment jsonl requires data"),
        ({"environment": "guessing:environment", "data": "a.jsonl"}, "data needs environment jsonl, but environment"),
        ({"environment": "guessing:environment", "eval_data": "a.jsonl"}, "data needs environment jsonl"),
    ],
)
def test_data_and_an_environment_that_do_not_match_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=message):
        read_prompts(config(**fields))


def test_prompts_without_a_renderer_and_unknown_graders_are_refused() -> None:
    with pytest.raises(BadConfig, match="environment jsonl needs a renderer, but renderer is none"):
        make_groups(config(environment="jsonl"), Prompts(), None)
    with pytest.raises(BadConfig, match="grader is 'nice': it must be exact, contains, number or module:function"):
        grader("nice")


def test_an_answer_that_the_grader_cannot_grade_is_reported_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "answer": "1,000"}\n{"prompt": "b", "answer": "two"}\n')
    with pytest.raises(BadData, match=r"a\.jsonl:2: .*'two'.*; grader is number"):
        read_prompts(config(environment="jsonl", data=file, grader="number"))
