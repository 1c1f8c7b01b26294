"""The workload of both sides: models, adapter, batch and prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_trainer.torch_model.tiny_model import TinyShape

ROWS = 8
TOKENS = 128

RANK = 32
ALPHA = 32.0
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-12

PROMPT_TOKENS = 64
SAMPLED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, the upper limit for the ratio of step times, and the number of steps in one measurement."""

    name: str
    shape: TinyShape
    goal: float
    steps_per_block: int


WORKLOADS = {
    "3M": Workload(
        "3 M",
        TinyShape(hidden_size=256, intermediate_size=640, layers=4, heads=4, kv_heads=2),
        goal=0.85,
        steps_per_block=5,
    ),
    "30M": Workload(
        "30 M",
        TinyShape(hidden_size=640, intermediate_size=1728, layers=6, heads=10, kv_heads=5, vocab_size=2048),
        goal=0.85,
        steps_per_block=2,
    ),
}


def token_rows(rows: int, tokens: int, vocab_size: int, seed: int = 0) -> Sequence[Sequence[int]]:
    """Return random token IDs with the shape `[rows][tokens]`."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(tokens)] for _ in range(rows)]
