"""A sampling client with scripted answers, and a server of such clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import tinker
from tinker import types

TOKENS = [7, 8, 9]


class ScriptedSampling:
    """A client that answers each prompt of tokens with `reply`, and records the requests."""

    def __init__(self, reply: Callable[[Sequence[int], types.SamplingParams], Sequence[int]] | None = None) -> None:
        self._reply = reply or (lambda _prompt, _params: TOKENS)
        self.prompts: list[list[int]] = []
        self.params: list[types.SamplingParams] = []
        self.under_way = self.most_under_way = 0

    @property
    def client(self) -> tinker.SamplingClient:
        return cast(tinker.SamplingClient, self)

    def get_base_model(self) -> str:
        return "scripted"

    def get_tokenizer(self) -> Any:
        raise OSError("no hub")

    async def sample(
        self, prompt: types.ModelInput, num_samples: int, sampling_params: types.SamplingParams
    ) -> types.SampleResponse:
        self.prompts.append(prompt.to_ints())
        self.params.append(sampling_params)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        tokens = list(self._reply(prompt.to_ints(), sampling_params))
        sequence = SimpleNamespace(tokens=tokens, stop_reason="stop", logprobs=[-0.5] * len(tokens))
        return cast(types.SampleResponse, SimpleNamespace(sequences=[sequence] * num_samples))

    async def compute_logprobs(self, prompt: types.ModelInput) -> list[float | None]:
        """Give each token a logprob that falls with its number."""
        self.prompts.append(prompt.to_ints())
        return [None, *(-token / 1000 for token in prompt.to_ints()[1:])]


class ScriptedService:
    """A session. `samplers` are by path; a path that is not among them is gone from the server."""

    def __init__(self, samplers: Mapping[str, ScriptedSampling]) -> None:
        self.samplers = samplers
        self.sessions = self.closed = 0

    def connect(self) -> tinker.ServiceClient:
        self.sessions += 1
        return cast(tinker.ServiceClient, self)

    async def create_sampling_client(self, model_path: str = "", base_model: str = "") -> ScriptedSampling:
        found = self.samplers.get(model_path or base_model)
        if found is None:
            answer = cast(Any, SimpleNamespace(status_code=404, request=None, headers={}))
            raise tinker.NotFoundError("no such sampler", response=answer, body=None)
        return found

    async def close(self, _status: str) -> None:
        self.closed += 1
