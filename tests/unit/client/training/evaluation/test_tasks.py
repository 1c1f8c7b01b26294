"""A task samples each example once, with its own seed, and returns what tinker-cookbook's evaluators return."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from threading import Semaphore
from typing import Any

import pytest
from support.client.scripted_sampling import ScriptedSampling
from tinker import types
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from tinsmith.training.errors import EvaluationError, GradeFailed
from tinsmith.training.evaluation import tasks
from tinsmith.training.evaluation.examples import Answer, Example
from tinsmith.training.evaluation.tasks import ChoiceTask, Task, by_name

pytestmark = pytest.mark.pytorch

EXAMPLES = [Example([1, 2]), Example([3], id="three"), Example([4, 5, 6])]


class Letters:
    """A tokenizer with one token for each character, without a chat template."""

    name_or_path = "letters"
    bos_token = None
    chat_template = None
    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, tokens))


class Chatting(Letters):
    chat_template = "{}"
    eos_token_id = 0

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, tokenize: bool) -> str:
        assert add_generation_prompt
        assert not tokenize
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def length(_example: Example, answer: Answer) -> float:
    return float(len(answer.tokens))


def task(grade: Any = length, **options: Any) -> Task:
    return Task("lengths", EXAMPLES, grade, **{"tokenizer": False, **options})


async def test_examples_that_begin_at_once_look_for_one_tokenizer_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, looked = Semaphore(), []

    def load(*server: str) -> Letters:
        assert looking.acquire(blocking=False), "two threads look at a time"
        looked.append(server)
        looking.release()
        return Letters()

    monkeypatch.setenv("TINKER_BASE_URL", "http://tin.example")
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    monkeypatch.setattr(tasks, "load_tokenizer", load)
    sampling = ScriptedSampling()
    found = await asyncio.gather(*(task(tokenizer=None).results(sampling.client) for _ in range(8)))
    assert [len(results) for results in found] == [3] * 8
    base_model = sampling.client.get_base_model()
    assert looked == [(base_model, "http://tin.example", "tml-key")] * 8, "each task once"


async def test_a_task_is_an_evaluator_of_the_cookbook() -> None:
    sampling = ScriptedSampling()
    evaluator = task()
    assert isinstance(evaluator, SamplingClientEvaluator)
    assert await evaluator(sampling.client) == {"eval/lengths/score": 3.0}
    assert sorted(sampling.prompts) == [[1, 2], [3], [4, 5, 6]]


async def test_each_example_draws_from_its_own_seed_that_is_the_same_next_time() -> None:
    seeds = []
    for seed in (None, None, 1):
        sampling = ScriptedSampling()
        await task(params=types.SamplingParams(max_tokens=2, seed=seed))(sampling.client)
        seeds.append([params.seed for params in sampling.params])
    assert len(set(seeds[0])) == len(EXAMPLES)
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize("graded", [float("nan"), None, "good", {}, {"a": float("inf")}])
async def test_values_that_are_not_numbers_are_not_averaged(graded: Any) -> None:
    with pytest.raises(GradeFailed, match="the grader returned"):
        await task(lambda *_: graded)(ScriptedSampling().client)


async def test_a_grader_that_raises_is_named_with_its_example() -> None:
    with pytest.raises(GradeFailed, match="example 0: the grader raised ZeroDivisionError"):
        await task(lambda *_: 1 / 0)(ScriptedSampling().client)


async def test_words_go_through_the_chat_template_and_end_as_it_ends() -> None:
    sampling = ScriptedSampling(lambda *_: [ord("h"), ord("i")])
    said: list[str] = []

    def note(_example: Example, answer: Answer) -> float:
        said.append(answer.text)
        return 1.0

    conversation = [{"role": "system", "content": "b"}, {"role": "user", "content": "c"}]
    chat = Task("chat", [Example("a"), Example(conversation), Example([1])], note, tokenizer=Chatting())
    await chat(sampling.client)
    rendered = ["".join(map(chr, tokens)) for tokens in sampling.prompts[:2]]
    assert rendered == ["<user>a<assistant>", "<system>b<user>c<assistant>"]
    assert sampling.prompts[2] == [1]
    assert (said, sampling.params[0].stop) == (["hi"] * 3, [0])


async def test_a_model_without_a_template_continues_the_plain_text() -> None:
    sampling = ScriptedSampling()
    await Task("raw", [Example("ab")], length, tokenizer=Letters())(sampling.client)
    assert (sampling.prompts, sampling.params[0].stop) == ([[97, 98]], None)
    with pytest.raises(EvaluationError, match="a conversation needs a renderer"):
        await Task("raw", [Example([{"role": "user", "content": "a"}])], length, tokenizer=Letters())(sampling.client)
    await Task("raw", [Example("a")], length, tokenizer=Chatting(), renderer="raw")(sampling.client)
    assert sampling.prompts[-1] == [97]


async def test_a_renderer_of_the_cookbook_renders_and_reads() -> None:
    sampling = ScriptedSampling(lambda *_: list(map(ord, " 2\n\nUser:")))
    said: list[str] = []

    def note(_example: Example, answer: Answer) -> float:
        said.append(answer.text)
        return 1.0

    await Task("colon", [Example("1+1?")], note, tokenizer=Letters(), renderer="role_colon")(sampling.client)
    assert "".join(map(chr, sampling.prompts[0])) == "User: 1+1?\n\nAssistant:"
    assert said == ["2"]
    with pytest.raises(EvaluationError, match="has no renderer unknown"):
        await Task("colon", [Example("a")], note, tokenizer=Letters(), renderer="unknown")(sampling.client)


async def test_choices_are_held_against_each_other_by_logprobs() -> None:
    """A character costs its code in thousandths, so the sum prefers `b` to `aa`, and the mean `aa`."""
    choices = ("b", "aa")
    examples = [Example("q", answer, choices=choices) for answer in ("b", 1)]
    first, second = await ChoiceTask("either", examples, tokenizer=Letters()).results(ScriptedSampling().client)
    assert first.scores == {"acc": 1.0, "acc_norm": 0.0}
    assert second.scores == {"acc": 0.0, "acc_norm": 1.0}
    assert [(answer.text, answer.logprob) for answer in first.answers] == [("b", -0.098), ("aa", -0.194)]


@pytest.mark.parametrize(("answer", "choices"), [(2, ("a", "b")), ("c", ("a", "b")), (0, ("a",))])
async def test_an_answer_that_is_not_a_choice_is_refused(answer: Any, choices: tuple[str, ...]) -> None:
    with pytest.raises(EvaluationError, match="choices"):
        await ChoiceTask("either", [Example("q", answer, choices=choices)], tokenizer=Letters())(
            ScriptedSampling().client
        )


def test_a_fingerprint_is_of_all_that_scores_depend_on() -> None:
    different = [
        task(),
        task(num_samples=2),
        task(params=types.SamplingParams(temperature=0.5)),
        Task("lengths", EXAMPLES[:2], length, tokenizer=False),
        ChoiceTask("lengths", EXAMPLES, tokenizer=False),
    ]
    assert len({one.fingerprint for one in different}) == len(different)
    assert task().fingerprint == task().fingerprint


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Task("none", [], length), "at least one example"),
        (lambda: Task("twice", [Example([1], id="a"), Example([2], id="a")], length), "two examples have the id a"),
        (lambda: task(num_samples=0), "num_samples is 0"),
        (lambda: by_name([task(), task()]), "two tasks are named lengths"),
        (lambda: by_name([]), "there are no tasks"),
    ],
)
def test_tasks_that_cannot_be_meant_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises(EvaluationError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (None, r"tokenizer of scripted.*tokenizer=False"),
        (False, "a text prompt needs a tokenizer, but this task has tokenizer=False"),
    ],
)
async def test_a_text_prompt_without_a_tokenizer_is_refused(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, message: str
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(EvaluationError, match=message):
        await Task("words", [Example("a")], length, tokenizer=tokenizer)(ScriptedSampling().client)
