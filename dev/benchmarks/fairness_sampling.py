"""Two tenants sample: A draws many long samples, and B draws a few tokens at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tinker
from fairness_scenarios import MODEL, SHAPE, Flood, Installation
from tinker import types
from typing_extensions import override
from workloads import token_rows

ON_THEIR_WAY, FLOOD_PROMPT_TOKENS, FLOOD_TOKENS = 32, 1024, 500
SMALL_PROMPT_TOKENS, SMALL_TOKENS = 16, 4


class SteadyFlood(Flood):
    """A flood with first requests of different lengths, so that the answers arrive evenly."""

    def __init__(self, submit: Callable[[int], Any]) -> None:
        super().__init__(lambda: submit(next(self._lengths)), on_their_way=ON_THEIR_WAY, units_each=FLOOD_TOKENS)
        self._lengths: Iterator[int] = iter(())

    @override
    def start(self) -> None:
        growing = (FLOOD_TOKENS * (place + 1) // ON_THEIR_WAY for place in range(ON_THEIR_WAY))
        self._lengths = itertools.chain(growing, itertools.repeat(FLOOD_TOKENS))
        super().start()


@dataclass(frozen=True, slots=True)
class SamplingBesideSampling:
    unit: str = "tokens"

    @contextmanager
    def flooding(self, installation: Installation) -> Iterator[Flood]:
        with installation.session_of_a() as service:
            submit = sampling(service, FLOOD_PROMPT_TOKENS, first_seed=1_000_000)
            yield SteadyFlood(submit)

    @contextmanager
    def requesting(self, installation: Installation) -> Iterator[Callable[[], float]]:
        with installation.session_of_b() as service:
            submit = sampling(service, SMALL_PROMPT_TOKENS, first_seed=0)

            def timed() -> float:
                started = time.perf_counter()
                submit(SMALL_TOKENS).result()
                return time.perf_counter() - started

            yield timed


def sampling(service: tinker.ServiceClient, prompt_tokens: int, first_seed: int) -> Callable[[int], Any]:
    """Return a function that submits base-model samples.

    Prompts never repeat, because a known prefix would be cached.
    """
    client = service.create_sampling_client(base_model=MODEL).result()
    seeds = itertools.count(first_seed)

    def submit(tokens: int) -> Any:
        [row] = token_rows(1, prompt_tokens, SHAPE.vocab_size, seed=next(seeds))
        params = types.SamplingParams(max_tokens=tokens, temperature=1.0, stop=[])
        return client.sample(types.ModelInput.from_ints(list(row)), 1, params)

    return submit
