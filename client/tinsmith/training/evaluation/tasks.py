"""Tasks.

A task consists of examples and a way to score answers. Every task is also an evaluator in the sense of tinker-cookbook.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import tinker
from tinker import types
from tinker_cookbook.eval.evaluators import SamplingClientEvaluator
from typing_extensions import override

from tinsmith.api import ApiError
from tinsmith.base_models import TokenizerError, load_tokenizer
from tinsmith.credentials import api_key_from_environment, base_url_from_environment
from tinsmith.training.errors import EvaluationError, GradeFailed
from tinsmith.training.evaluation.examples import (
    DEFAULT_CONCURRENCY,
    DEFAULT_MAX_TOKENS,
    DEFAULT_SEED,
    Answer,
    Example,
    ExampleResult,
    Grade,
    digest_of,
    mean_scores,
    numbered,
    scores_of,
    seed_for,
)
from tinsmith.training.evaluation.intervals import Estimate, estimate
from tinsmith.training.evaluation.rendering import Rendering, rendering_by

if TYPE_CHECKING:
    from tinker_cookbook.renderers import Renderer

_FINDING = threading.Lock()


class ExampleTask(SamplingClientEvaluator, ABC):
    """A task with a score for each example.

    Because each example has a score, intervals can be computed, and a sweep can resume.

    `rendering_by` explains `renderer` and `tokenizer`. With tokenizer None, the sampling client's tokenizer is used.
    """

    def __init__(
        self,
        name: str,
        examples: Iterable[Example],
        *,
        renderer: Renderer | str | None = None,
        tokenizer: Any | Literal[False] | None = None,
    ) -> None:
        self.name = name
        self.examples = numbered(examples)
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._renderings: dict[str, Rendering] = {}
        self._tokenizers: dict[str, Any] = {}

    @abstractmethod
    async def result(self, sampling_client: tinker.SamplingClient, example: Example) -> ExampleResult:
        """Evaluate one example. Raises GradeFailed, EvaluationError, and the errors of the SDK."""

    @property
    def fingerprint(self) -> str:
        """Return a hexadecimal digest of everything that affects the results, except weights and the grader's code."""
        renderer = self._renderer if isinstance(self._renderer, str | None) else type(self._renderer).__name__
        return digest_of([[example.digest for example in self.examples], renderer, self._settings()])

    @override
    async def __call__(self, sampling_client: tinker.SamplingClient) -> dict[str, float]:
        """Return the metrics with the names `eval/<task>/<metric>`, for the logs of tinker-cookbook's loops."""
        return metrics_of(self.name, estimates_of(await self.results(sampling_client)))

    async def results(
        self, sampling_client: tinker.SamplingClient, limit: asyncio.Semaphore | None = None
    ) -> list[ExampleResult]:
        """Return the results of all examples, in order. At most `limit` examples are evaluated at the same time."""
        limit = limit or asyncio.Semaphore(DEFAULT_CONCURRENCY)

        async def one(example: Example) -> ExampleResult:
            async with limit:
                return await self.result(sampling_client, example)

        tasks = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(example)) for example in self.examples]
        except BaseExceptionGroup as several:
            # The others were cancelled.
            raise several.exceptions[0] from None
        return [task.result() for task in tasks]

    async def rendering(self, sampling_client: tinker.SamplingClient) -> Rendering:
        """Return the rendering for the base model of the client. The tokenizer is loaded only once."""
        base_model = sampling_client.get_base_model()
        if base_model not in self._renderings:
            # Loading may read from disk or from a hub.
            tokenizer = self._tokenizer
            if tokenizer is None:
                tokenizer = await asyncio.to_thread(self._find_tokenizer_once, sampling_client)
            self._renderings[base_model] = rendering_by(self._renderer, tokenizer)
        return self._renderings[base_model]

    def _find_tokenizer_once(self, sampling_client: tinker.SamplingClient) -> Any:
        """Find the tokenizer under a lock.

        Examples start in threads, and two threads cannot import transformers at once.
        """
        base_model = sampling_client.get_base_model()
        with _FINDING:
            if base_model not in self._tokenizers:
                self._tokenizers[base_model] = self._find_tokenizer(sampling_client)
            return self._tokenizers[base_model]

    def _find_tokenizer(self, sampling_client: tinker.SamplingClient) -> Any:
        base_model, api_key = sampling_client.get_base_model(), api_key_from_environment()
        try:
            # Without a key there is no server to ask.
            found = load_tokenizer(base_model, base_url_from_environment(), api_key) if api_key else None
            return sampling_client.get_tokenizer() if found is None else found
        except (OSError, ValueError, TokenizerError, ApiError) as error:
            needed = "set the task's tokenizer, or tokenizer=False if its prompts are tokens"
            raise EvaluationError(f"the tokenizer of {base_model} was not found ({error}): {needed}") from error

    def _settings(self) -> Any:
        return None


class Task(ExampleTask):
    """A task that samples answers and scores each answer by `grade(example, answer)`.

    `grade` returns a number, or several numbers by name. `grade` may be an async function. The default of `params` is
    256 tokens at temperature 0. Without `stop`, an answer ends as the renderer or the chat template defines. Each
    example has a separate seed, which is derived from `params.seed`.
    """

    def __init__(
        self,
        name: str,
        examples: Iterable[Example],
        grade: Grade,
        *,
        params: types.SamplingParams | None = None,
        num_samples: int = 1,
        renderer: Renderer | str | None = None,
        tokenizer: Any | Literal[False] | None = None,
    ) -> None:
        super().__init__(name, examples, renderer=renderer, tokenizer=tokenizer)
        if num_samples < 1:
            raise EvaluationError(f"task {name}: num_samples is {num_samples}; it must be 1 or more")
        self._grade = grade
        self._params = params or types.SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, temperature=0.0)
        self._num_samples = num_samples

    @override
    async def result(self, sampling_client: tinker.SamplingClient, example: Example) -> ExampleResult:
        rendering = await self.rendering(sampling_client)
        response = await sampling_client.sample(
            rendering.prompt(example.prompt), self._num_samples, self._params_for(example, rendering)
        )
        answers = [await self._scored(example, rendering, sequence) for sequence in response.sequences]
        return ExampleResult(example.id, mean_scores(answers), answers)

    def _params_for(self, example: Example, rendering: Rendering) -> types.SamplingParams:
        seed = seed_for(DEFAULT_SEED if self._params.seed is None else self._params.seed, example)
        stop = rendering.stop if self._params.stop is None else self._params.stop
        return self._params.model_copy(update={"seed": seed, "stop": stop})

    async def _scored(self, example: Example, rendering: Rendering, sequence: types.SampledSequence) -> Answer:
        logprobs = sequence.logprobs
        answer = Answer(
            text=rendering.text(sequence.tokens),
            tokens=sequence.tokens,
            stop_reason=str(sequence.stop_reason),
            logprob=None if logprobs is None else sum(logprobs),
        )
        try:
            graded = self._grade(example, answer)
            graded = await graded if inspect.isawaitable(graded) else graded
        except Exception as error:
            raise GradeFailed(f"example {example.id}: the grader raised {type(error).__name__}: {error}") from error
        scores = scores_of(graded, example.id)
        return Answer(answer.text, answer.tokens, answer.stop_reason, answer.logprob, scores)

    @override
    def _settings(self) -> Any:
        return [self._params.model_dump(), self._num_samples]


class ChoiceTask(ExampleTask):
    """A task in which the model's answer is the most probable of an example's `choices`. No answer is sampled.

    `answer` is the position or the text of the right choice. `acc` compares the sums of the tokens' logprobs.
    `acc_norm` compares the sums of the logprobs divided by the number of characters, as in lm-evaluation-harness.
    """

    @override
    async def result(self, sampling_client: tinker.SamplingClient, example: Example) -> ExampleResult:
        rendering = await self.rendering(sampling_client)
        right = right_choice(example)
        logprobs = await asyncio.gather(
            *(self._logprob(sampling_client, rendering, example, choice) for choice in example.choices)
        )
        by_length = [logprob / max(1, len(choice)) for logprob, choice in zip(logprobs, example.choices, strict=True)]
        scores = {
            "acc": float(logprobs.index(max(logprobs)) == right),
            "acc_norm": float(by_length.index(max(by_length)) == right),
        }
        answers = [Answer(choice, logprob=logprob) for choice, logprob in zip(example.choices, logprobs, strict=True)]
        return ExampleResult(example.id, scores, answers)

    async def _logprob(
        self, sampling_client: tinker.SamplingClient, rendering: Rendering, example: Example, choice: str
    ) -> float:
        whole, answer_tokens = rendering.continued(example.prompt, choice)
        logprobs = (await sampling_client.compute_logprobs(whole))[-answer_tokens:]
        if any(logprob is None for logprob in logprobs):
            raise EvaluationError(f"example {example.id}: the server gave no logprobs of choice {choice!r}")
        return float(sum(logprob for logprob in logprobs if logprob is not None))


def right_choice(example: Example) -> int:
    """Return the position of the right choice.

    Raises EvaluationError for fewer than two choices, and for an answer that is not among the choices.
    """
    if len(example.choices) < 2:
        raise EvaluationError(f"example {example.id} has {len(example.choices)} choices; it must have two or more")
    if isinstance(example.answer, int) and 0 <= example.answer < len(example.choices):
        return example.answer
    if example.answer in example.choices:
        return list(example.choices).index(example.answer)
    raise EvaluationError(f"example {example.id}: the answer {example.answer!r} is not one of its choices")


def estimates_of(results: Sequence[ExampleResult]) -> dict[str, Estimate]:
    """Return the mean of each metric, with an interval, over the examples with a value of this metric."""
    names = dict.fromkeys(name for result in results for name in result.scores)
    return {name: estimate([result.scores[name] for result in results if name in result.scores]) for name in names}


def metrics_of(task: str, estimates: Mapping[str, Estimate]) -> dict[str, float]:
    return {f"eval/{task}/{name}": interval.mean for name, interval in estimates.items()}


def name_of(evaluator: SamplingClientEvaluator) -> str:
    """Return the evaluator's `name`, or the name of the evaluator's class."""
    return str(getattr(evaluator, "name", "") or type(evaluator).__name__)


def by_name(evaluators: Iterable[Any]) -> dict[str, Any]:
    """Return the evaluators by name.

    Raises EvaluationError for a repeated name, and for an empty list of evaluators.
    """
    named: dict[str, Any] = {}
    for evaluator in evaluators:
        if (name := name_of(evaluator)) in named:
            raise EvaluationError(f"two tasks are named {name}; rename one of them")
        named[name] = evaluator
    if not named:
        raise EvaluationError("there are no tasks")
    return named
