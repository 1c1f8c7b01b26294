"""What is measured: the models, the batch, the adapter and the goals, the same for both sides."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_trainer.tiny_model import TinyShape

ROWS = 8
TOKENS = 128
RANK = 32
ALPHA = 32.0
LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-12


@dataclass(frozen=True, slots=True)
class Workload:
    """A model size, the ratio to stay below, and how many steps make one measurement."""

    name: str
    shape: TinyShape
    goal: float
    steps_per_block: int


SMALL = Workload(
    "3 M",
    TinyShape(hidden_size=256, intermediate_size=640, layers=4, heads=4, kv_heads=2),
    goal=1.25,
    steps_per_block=5,
)
LARGE = Workload(
    "30 M",
    TinyShape(hidden_size=640, intermediate_size=1728, layers=6, heads=10, kv_heads=5, vocab_size=2048),
    goal=1.10,
    steps_per_block=2,
)


def token_rows(vocab_size: int, seed: int = 0) -> Sequence[Sequence[int]]:
    """ROWS sequences of TOKENS inputs, each with the target of its last token: `[ROWS][TOKENS + 1]`."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(TOKENS + 1)] for _ in range(ROWS)]
