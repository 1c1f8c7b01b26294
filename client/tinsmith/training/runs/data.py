"""The data for training and evaluation in a run: reading, splitting and batches. The learning rate of each step."""

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
    """Return the learning rate of `step`. Steps count from 0. During a warm-up, the rate is never 0."""
    if step < warmup_steps:
        return highest * (step + 1) / (warmup_steps + 1)
    done = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    if schedule == "linear":
        return highest * (1 - done)
    if schedule == "cosine":
        return highest * 0.5 * (1 + math.cos(math.pi * done))
    return highest


class ShuffledBatches:
    """Batches over several epochs. The seed shuffles each epoch. The last batch may be smaller.

    A batch depends only on its number, so a resumed run needs only the number of the next batch.
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
        """Return the examples of the batch, as positions in the data. Raises IndexError after the last batch."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        first = number * self.batch_size
        return [self._place(at) for at in range(first, min(first + self.batch_size, self._examples))]

    def epoch_after(self, number: int) -> float:
        """Return the number of epochs that are done after batch `number`. The number of epochs may be a fraction."""
        return min((number + 1) * self.batch_size, self._examples) / self._count

    def _place(self, at: int) -> int:
        epoch, within = divmod(at, self._count)
        if self._epoch[0] != epoch:
            order = list(range(self._count))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1][within]


def held_out_split(count: int, fraction: float, most: int, seed: int) -> tuple[list[int], list[int]]:
    """Split the positions at random into training and evaluation. Evaluation gets at most `most` positions.

    Training gets at least one position.
    """
    # The fraction is computed as an exact decimal, because in floating point 70 * 0.1 is more than 7.
    held_out = min(math.ceil(count * Fraction(str(fraction))), most, count - 1)
    order = list(range(count))
    random.Random(f"{seed} held out").shuffle(order)
    return sorted(order[held_out:]), sorted(order[:held_out])


Example = TypeVar("Example")
Sequences = tuple[Tokens, ...]
"""The sequences of an example: one or more for a conversation, and two for a preference."""


@dataclass(frozen=True, slots=True)
class Examples(Generic[Example]):
    """The examples of a run in text form. `digest` is the digest of the files."""

    train: list[Located[Example]]
    held_out: list[Located[Example]]
    digest: str

    @classmethod
    def read(cls, config: DataConfig, parse: Callable[[Mapping[str, Any]], Example]) -> Examples[Example]:
        """Read the examples. Raises BadData."""
        found = read_examples(config.data, parse)
        digest = digest_of_files([config.data, config.eval_data])
        if config.eval_data is not None:
            return cls(found, read_examples(config.eval_data, parse)[: config.eval_examples], digest)
        train, held_out = held_out_split(len(found), config.eval_fraction, config.eval_examples, config.seed)
        return cls([found[place] for place in train], [found[place] for place in held_out], digest)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The examples as tokens.

    `dropped` and `truncated` count examples that were too long. `dropped` also counts examples without a learned token.
    """

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
    """Render the examples as tokens.

    If `are_compared` is true, an example needs all its sequences.

    Raises BadData if an example cannot be rendered or is refused as too long, and if no example is left.
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
        raise BadData(f"no example of {config.data} fits into max_length ({config.max_length} tokens)")
    return Prepared(train, held_out, cut.dropped, cut.truncated)


def datum_of(tokens: Tokens, weight: float = 1.0) -> types.Datum:
    """Return a datum for next-token prediction.

    `weight` is the loss weight of each learned token.
    """
    inputs: Any = {
        "target_tokens": tokens.tokens[1:],
        "weights": [weight if learned else 0.0 for learned in tokens.learned[1:]],
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens.tokens[:-1]), loss_fn_inputs=inputs)


def learned_count(tokens: Tokens) -> int:
    """Return the number of learned tokens.

    The first token is never learned, because no token precedes the first token.
    """
    return sum(tokens.learned[1:])


def learned_logprobs(client: tinker.TrainingClient, sequences: Sequence[Tokens], size: int) -> list[float]:
    """Return, for each sequence, the sum of the logprobs of its learned tokens under the current weights."""
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
    """A filter that truncates or drops examples that are too long, and counts them."""

    def __init__(self, config: DataConfig, *, are_compared: bool) -> None:
        self._are_compared = are_compared
        self._longest = config.max_length
        self._too_long = config.too_long
        self.dropped = self.truncated = 0

    def fit(self, location: str, sequences: Sequences) -> Sequences | None:
        """Return the sequences, truncated if necessary, or None if the example is dropped."""
        length = max(len(sequence.tokens) for sequence in sequences)
        if length > self._longest:
            if self._too_long == "refuse":
                raise BadData(f"{location}: {length} tokens, more than max_length ({self._longest})")
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
