"""Two tenants train: A sends operations of many datums, and B sends operations of a few datums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import tinker
from fairness_scenarios import MODEL, SHAPE, Flood, Installation
from sides import step_datum
from tinker import types
from workloads import BETAS, EPS, LEARNING_RATE, RANK, ROWS, TOKENS, token_rows

FLOOD_DATUMS = 64
ON_THEIR_WAY = 4
LOSS = "cross_entropy"
ADAM = types.AdamParams(learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS)

Request = Callable[[tinker.TrainingClient], None]


@dataclass(frozen=True, slots=True)
class TrainingBesideTraining:
    request: Request
    unit: str = "tokens"

    @contextmanager
    def flooding(self, installation: Installation) -> Iterator[Flood]:
        """Return a flood that always keeps several operations of many microbatches waiting."""
        data = [step_datum(row) for row in token_rows(FLOOD_DATUMS, TOKENS + 1, SHAPE.vocab_size)]
        with installation.session_of_a() as service:
            client = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()
            yield Flood(
                lambda: client.forward_backward(data, LOSS),
                on_their_way=ON_THEIR_WAY,
                units_each=FLOOD_DATUMS * TOKENS,
            )

    @contextmanager
    def requesting(self, installation: Installation) -> Iterator[Callable[[], float]]:
        with installation.session_of_b() as service:
            client = service.create_lora_training_client(base_model=MODEL, rank=RANK).result()

            def timed() -> float:
                started = time.perf_counter()
                self.request(client)
                return time.perf_counter() - started

            yield timed


def training_steps() -> TrainingBesideTraining:
    """Return the scenario of training steps with one microbatch.

    Each step submits `forward_backward` and `optim_step` together.
    """
    data = [step_datum(row) for row in token_rows(ROWS, TOKENS + 1, SHAPE.vocab_size)]

    def step(client: tinker.TrainingClient) -> None:
        futures = client.forward_backward(data, LOSS), client.optim_step(ADAM)
        for future in futures:
            future.result()

    return TrainingBesideTraining(step)


def one_forward() -> TrainingBesideTraining:
    """Return the scenario of forward calls of one datum without a gradient, which are the shortest calls."""
    data = [step_datum(row) for row in token_rows(1, TOKENS + 1, SHAPE.vocab_size)]
    return TrainingBesideTraining(lambda client: _finish(client.forward(data, LOSS)))


def _finish(future: tinker.APIFuture[types.ForwardBackwardOutput]) -> None:
    future.result()
