"""A training client that computes nothing and records its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import tinker
from tinker import types


class SimulatedSampler:
    """A sampler that answers with the tokens of `answer(prompt, seed)`."""

    def __init__(self, answer: Callable[[list[int], int | None], list[int]]) -> None:
        self._answer = answer
        self.requests: list[tuple[list[int], types.SamplingParams]] = []

    def sample(self, prompt: tinker.ModelInput, count: int, params: types.SamplingParams) -> Awaitable[Any]:
        self.requests.append((prompt.to_ints(), params))
        return self._sampled(prompt.to_ints(), params.seed)

    async def _sampled(self, prompt: list[int], seed: int | None) -> SimpleNamespace:
        await asyncio.sleep(0)
        tokens = self._answer(prompt, seed)
        sequence = SimpleNamespace(tokens=tokens, logprobs=[-1.0] * len(tokens), stop_reason="length")
        return SimpleNamespace(sequences=[sequence])


class SimulatedModel:
    """A model that fails with an error at the forward pass of a given number (`fails`)."""

    def __init__(self, sampler: SimulatedSampler, fails: dict[int, Exception] | None = None) -> None:
        self.sampler = sampler
        self.trained: list[Sequence[tinker.Datum]] = []
        self.steps = 0
        self._fails = fails or {}

    async def save_weights_and_get_sampling_client(self) -> SimulatedSampler:
        return self.sampler

    async def forward_backward(self, data: list[tinker.Datum], *_: Any) -> types.ForwardBackwardOutput:
        self.trained.append(data)
        if error := self._fails.get(len(self.trained) - 1):
            raise error
        return types.ForwardBackwardOutput(
            loss_fn_output_type="scalar",
            loss_fn_outputs=[{} for _ in data],
            metrics={"loss:sum": float(len(data))},
        )

    async def optim_step(self, adam: types.AdamParams) -> types.OptimStepResponse:
        self.steps += 1
        return types.OptimStepResponse(metrics={"grad_norm": 1.0})
