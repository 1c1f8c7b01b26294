"""Training and evaluation data of a run: reading, splitting, batches, and the learning rate of each step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic, Literal, TypeVar

import tinker
from tinker import types

from tinsmith.training.errors import BadData
from tinsmith.training.runs.config import DataConfig
from tinsmith.training.runs.json_lines import BadExample, Located, digest_of_files, read_examples
from tinsmith.training.runs.rendering import Tokens

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate_at(step: int, total_steps: int, highest: float, schedule: Schedule, warmup_steps: int) -> float:
    """Of step `step`, which counts from 0. The first step of a warm-up has a part of the highest, none has 0."""
    if step < warmup_steps:
        return highest * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return highest * (1 - done)
    if schedule == "cosine":
        return highest * 0.5 * (1 + math.cos(math.pi * done))
    return highest


class ShuffledBatches:
    """Batches over several epochs, each in an order of its own that the seed says; the last batch may be smaller.

    A batch is known by its number alone: a run that goes on needs no other position.
    """

    def __init__(self, count: int, batch_size: int, epochs: int, seed: int) -> None:
        self._count = count
        self.batch_size = batch_size
        self._examples = count * epochs
        self._seed = seed
        self._epoch: tuple[int, Sequence[int]] = (-1, ())

    def __len__(self) -> int:
        return math.ceil(self._examples / self.batch_size)

    def __getitem__(self, number: int) -> list[int]:
        """Places of the examples in the data. Raises IndexError after the last batch."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        first = number * self.batch_size
        return [self._place(at) for at in range(first, min(first + self.batch_size, self._examples))]

    def epoch_after(self, number: int) -> float:
        """How often the data was gone through when batch `number` is done."""
        return min((number + 1) * self.batch_size, self._examples) / self._count

    def _place(self, at: int) -> int:
        epoch, within = divmod(at, self._count)
        if self._epoch[0] != epoch:
            order = list(range(self._count))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1][within]


def held_out_split(count: int, fraction: float, most: int, seed: int) -> tuple[list[int], list[int]]:
    """Places of those to train on and of those that are held out, `most` at most, by chance.

    At least one stays to train on.
    """
    # The fraction as it is written: in floating point 70 * 0.1 is more than 7.
    held_out = min(math.ceil(count * Fraction(str(fraction))), most, count - 1)
    order = list(range(count))
    random.Random(f"{seed} held out").shuffle(order)
    return sorted(order[held_out:]), sorted(order[:held_out])


Example = TypeVar("Example")
Sequences = tuple[Tokens, ...]
"""Of one example: one or more for a conversation, two for a preference."""


@dataclass(frozen=True, slots=True)
class Examples(Generic[Example]):
    """As they were read. `digest` is of the files."""

    train: list[Located[Example]]
    held_out: list[Located[Example]]
    digest: str

    @classmethod
    def read(cls, config: DataConfig, parse: Callable[[Mapping[str, Any]], Example]) -> Examples[Example]:
        """Raises BadData."""
        found = read_examples(config.data, parse)
        digest = digest_of_files([config.data, config.eval_data])
        if config.eval_data is not None:
            return cls(found, read_examples(config.eval_data, parse)[: config.eval_examples], digest)
        train, held_out = held_out_split(len(found), config.eval_fraction, config.eval_examples, config.seed)
        return cls([found[place] for place in train], [found[place] for place in held_out], digest)


@dataclass(frozen=True, slots=True)
class Prepared:
    """As tokens. `dropped` and `truncated` were too long, or had nothing left to learn."""

    train: list[Sequences]
    held_out: list[Sequences]
    dropped: int
    truncated: int

    def described(self) -> dict[str, int]:
        return {
            "examples": len(self.train),
            "held_out": len(self.held_out),
            "dropped": self.dropped,
            "truncated": self.truncated,
            "tokens": sum(len(sequence.tokens) for example in self.train for sequence in example),
        }


def prepare(
    config: DataConfig,
    examples: Examples[Example],
    render: Callable[[Example], Sequences],
    *,
    are_compared: bool = False,
) -> Prepared:
    """`are_compared`: of the sequences of an example none means anything without the others.

    Raises BadData for what cannot be rendered or is too long where that is refused, and where none is left.
    """
    cut = _Cut(config, are_compared=are_compared)
    train = [
        fitted
        for located in examples.train
        if (fitted := cut.fit(located.location, _rendered(located, render))) is not None
    ]
    held_out = [
        fitted
        for located in examples.held_out
        if (fitted := cut.fit(located.location, _rendered(located, render))) is not None
    ]
    if not train:
        raise BadData(f"no example of {config.data} fits into max_length, {config.max_length} tokens")
    return Prepared(train, held_out, cut.dropped, cut.truncated)


def datum_of(tokens: Tokens, weight: float = 1.0) -> types.Datum:
    """Each token is predicted from those before it; `weight` is that of each one that is learned."""
    inputs: Any = {
        "target_tokens": tokens.tokens[1:],
        "weights": [weight if learned else 0.0 for learned in tokens.learned[1:]],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens.tokens[:-1]), loss_fn_inputs=inputs)


def learned_count(tokens: Tokens) -> int:
    """The first token is predicted from nothing, and not learned."""
    return sum(tokens.learned[1:])


def learned_logprobs(client: tinker.TrainingClient, sequences: Sequence[Tokens], size: int) -> list[float]:
    """The sum over what is learned of each, under the weights as they are; `size` of them in a call."""
    calls = [
        client.forward([datum_of(sequence) for sequence in sequences[first : first + size]], "cross_entropy")
        for first in range(0, len(sequences), size)
    ]
    outputs = [output for call in calls for output in call.result().loss_fn_outputs]
    return [sum(_learned(sequence, output)) for sequence, output in zip(sequences, outputs, strict=True)]


def _learned(tokens: Tokens, output: types.LossFnOutput) -> Iterator[float]:
    logprobs = output["logprobs"].data
    return (float(logprob) for logprob, learned in zip(logprobs, tokens.learned[1:], strict=True) if learned)


def _rendered(located: Located[Example], render: Callable[[Example], Sequences]) -> Sequences:
    try:
        return render(located.example)
    except BadExample as error:
        raise BadData(f"{located.location}: {error}") from error


class _Cut:
    """What does not fit, counted."""

    def __init__(self, config: DataConfig, *, are_compared: bool) -> None:
        self._are_compared = are_compared
        self._longest = config.max_length
        self._too_long = config.too_long
        self.dropped = self.truncated = 0

    def fit(self, location: str, sequences: Sequences) -> Sequences | None:
        """None where it is dropped."""
        length = max(len(sequence.tokens) for sequence in sequences)
        if length > self._longest:
            if self._too_long == "refuse":
                raise BadData(f"{location}: {length} tokens, and max_length is {self._longest}")
            if self._too_long == "drop":
                self.dropped += 1
                return None
            self.truncated += 1
            sequences = tuple(
                Tokens(sequence.tokens[: self._longest], sequence.learned[: self._longest]) for sequence in sequences
            )
        fruitful = tuple(sequence for sequence in sequences if learned_count(sequence) > 0)
        if not fruitful or (self._are_compared and fruitful != sequences):
            self.dropped += 1
            return None
        return fruitful
