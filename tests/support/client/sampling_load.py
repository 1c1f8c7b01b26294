"""Programs that sample without pause while a test disturbs their servers.

The same prompt, weights and seed give the same tokens on every replica, so answers can be compared without knowing
which replica gave them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import tinker
from tinker import types

PROMPTS = [[5, 9, 2, 14], [4, 4, 8], [7, 1, 6, 8, 0, 3]]
SEEDS = 4
IN_FLIGHT = 6
MAX_TOKENS = 24

Question = tuple[int, int]
"""The prompt, and the seed."""

Open = Callable[[tinker.ServiceClient], tinker.SamplingClient]


@dataclass
class Answers:
    """The answers that one program received. `conflicting` are questions that were answered in two ways."""

    count: int = 0
    known: dict[Question, list[list[int]]] = field(default_factory=dict)
    conflicting: set[Question] = field(default_factory=set)
    error: BaseException | None = None

    def note(self, question: Question, tokens: list[list[int]]) -> None:
        self.count += 1
        if self.known.setdefault(question, tokens) != tokens:
            self.conflicting.add(question)


@contextmanager
def sampling_load(connect: Callable[[], tinker.ServiceClient], samplers: Sequence[Open]) -> Iterator[list[Answers]]:
    """Run a program for each sampler, each in its own session, until the block ends.

    Raises the first error that a program saw, which excludes errors that the SDK hides.
    """
    stop = threading.Event()
    answers = [Answers() for _ in samplers]
    threads = [
        threading.Thread(target=_ask, args=(connect, open_sampler, of_one, stop), daemon=True)
        for open_sampler, of_one in zip(samplers, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    for of_one, thread in zip(answers, threads, strict=True):
        if of_one.error is not None:
            raise of_one.error
        assert not thread.is_alive(), "a sample was never answered"


def wait_for_more(answers: Sequence[Answers], more: int = 10, timeout_seconds: float = 120) -> None:
    """Wait until every program has received this many more answers. Raises the first failure of a program."""
    wanted = [of_one.count + more for of_one in answers]
    deadline = time.monotonic() + timeout_seconds
    while any(of_one.count < count for of_one, count in zip(answers, wanted, strict=True)):
        for of_one in answers:
            if of_one.error is not None:
                raise of_one.error
        assert time.monotonic() < deadline, f"samples stopped coming: {[of_one.count for of_one in answers]}"
        time.sleep(0.1)


def _ask(
    connect: Callable[[], tinker.ServiceClient], open_sampler: Open, answers: Answers, stop: threading.Event
) -> None:
    try:
        client = connect()
        try:
            sampler = open_sampler(client)
            number = 0
            while not stop.is_set():
                questions = [(index % len(PROMPTS), index % SEEDS) for index in range(number, number + IN_FLIGHT)]
                number += IN_FLIGHT
                pending = [(question, _sample(sampler, question)) for question in questions]
                for question, future in pending:
                    answers.note(question, [sequence.tokens for sequence in future.result().sequences])
        finally:
            client.close("success").result()
    except BaseException as error:
        answers.error = error


def _sample(sampler: tinker.SamplingClient, question: Question):  # type: ignore[no-untyped-def]
    prompt, seed = question
    params = types.SamplingParams(max_tokens=MAX_TOKENS, seed=seed)
    return sampler.sample(types.ModelInput.from_ints(PROMPTS[prompt]), 2, params)
