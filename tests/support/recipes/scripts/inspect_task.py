"""A task of inspect-ai: sums that are right or wrong. `inspect eval` runs it."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

QUESTIONS = 6
MOST_TOKENS = 32


@task
def sums() -> Task:
    samples = [Sample(f"How much is {number} + 1?", target=str(number + 1)) for number in range(1, 1 + QUESTIONS)]
    return Task(samples, solver=generate(), scorer=includes(), config=GenerateConfig(max_tokens=MOST_TOKENS))
