"""Text requests, which need no session. Prompts and answers are texts.

The worker has the model's files, so the worker renders prompts and parses answers. The server has no tokenizer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.errors import Gone, TooManySamples, Unprocessable, WorkerError, WorkerUnavailable
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.checkpoints.checkpoints import Checkpoints
from tinsmith_server.services.checkpoints.promotions import Promotions
from tinsmith_server.services.failures import Failure
from tinsmith_server.services.polling.long_polls import LongPolls
from tinsmith_server.services.sampling.dispatch import CANCEL_SECONDS, Dispatch, Need
from tinsmith_server.services.sampling.sampling import Sampler, Sampling
from tinsmith_server.store.records import SamplingSession
from tinsmith_server.wire.dialects.texts import Prompt, TextRequest, TokenUsage
from tinsmith_server.wire.ids import KIND_OF_TYPE, SampleId, TinkerPath

T = TypeVar("T")

# While samplers are full, the SDK retries without limit. Other clients give up after a few tries.
PATIENCE_SECONDS = 20.0
MOST_SAVED = 1000
PAUSE_SECONDS = 1.0
HOLD_SECONDS = 20.0
STOPPING = "the server is stopping; send the request again"
TOKEN_BYTES = 4

Pieces = Sequence[worker_pb2.TextPiece]


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that can be sampled. `created` is in Unix seconds; 0 means that the time is unknown."""

    name: str
    created: int


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a sample: a saved sampler with the digest of its manifest, or a base model without a digest."""

    path: str
    digest: str

    @classmethod
    def of(cls, session: SamplingSession) -> Weights:
        return cls(session.model_path or session.base_model, session.manifest_digest or "")


class Texts:
    """A service that submits text requests. The samples of a text request can be read while they run."""

    def __init__(
        self,
        fleet: Fleet,
        checkpoints: Checkpoints,
        promotions: Promotions,
        sampling: Sampling,
        dispatch: Dispatch,
        long_polls: LongPolls,
    ) -> None:
        self._fleet = fleet
        self._checkpoints = checkpoints
        self._promotions = promotions
        self._sampling = sampling
        self._dispatch = dispatch
        self._long_polls = long_polls

    async def models(self, tenant: str) -> list[NamedModel]:
        """Return all models that the tenant can sample: base models, promoted names, and the newest saved samplers."""
        bases = [NamedModel(model.name, 0) for model in self._fleet.models if model.sampling]
        promoted = await self._promotions.list(tenant)
        names = [NamedModel(one.name, int(one.at.timestamp())) for one in promoted if not self._fleet.model(one.name)]
        page = await self._checkpoints.all(tenant, MOST_SAVED, 0, frozenset({"sampler"}))
        saved = [
            NamedModel(str(TinkerPath(one.run_id, KIND_OF_TYPE[one.type], one.name)), int(one.created_at.timestamp()))
            for one in page.rows
        ]
        return bases + names + saved

    async def model(self, tenant: str, name: str) -> NamedModel:
        """Return the model of a name. Raises NotFound if this tenant cannot sample the model."""
        await self._sampling.once(tenant, name)
        return next((model for model in await self.models(tenant) if model.name == name), NamedModel(name, 0))

    async def count(self, tenant: str, model: str, prompt: Prompt) -> int:
        """Return the number of the prompt's tokens. Raises NotFound, Unprocessable, TooManySamples."""
        if prompt.images:
            raise Unprocessable("the tokens of images are not counted; count the conversation without its images")
        sampler = await self._sampling.once(tenant, model)
        return len((await self._rendered(sampler, prompt)).tokens) // TOKEN_BYTES

    async def render(
        self, tenant: str, model: str, request: worker_pb2.RenderPromptRequest
    ) -> worker_pb2.RenderPromptReply:
        """Return the tokens of a prompt. Raises NotFound, Unprocessable, TooManySamples."""
        return await self._rendered(await self._sampling.once(tenant, model), Prompt(request))

    async def begin(self, tenant: str, request: TextRequest) -> list[Generation]:
        """Submit one sample for each prompt.

        Raises NotFound, Unprocessable, and TooManySamples after a wait. After an error, the other samples are stopped.
        """
        sampler = await self._sampling.once(tenant, request.model)
        begun: list[Generation] = []
        try:
            for number, prompt in enumerate(request.prompts):
                rendered = await self._rendered(sampler, prompt)
                message = _sample_request(request, prompt, rendered)
                sample = await _patiently(partial(self._sampling.submit_once, sampler, number, message))
                weights = Weights.of(sampler.session)
                begun.append(Generation(self, tenant, sample, len(rendered.tokens) // TOKEN_BYTES, weights))
        except BaseException:
            await asyncio.shield(stop_all(begun))
            raise
        return begun

    async def pieces(self, sample: SampleId, seen: int) -> worker_pb2.AwaitTextReply:
        """Return new pieces as soon as the sampler has any. Raises WorkerUnavailable for a lost sample."""
        reply = await self._long_polls.hold(self._await_text(sample, seen), released=None)
        if reply is None:
            raise WorkerUnavailable(STOPPING)
        match reply.WhichOneof("state"):
            case "failure":
                failure = Failure.from_worker(reply.failure)
                raise (Unprocessable if failure.category == "user" else WorkerError)(failure.message)
            case "not_found":
                raise WorkerUnavailable("the sampler was restarted; send the request again")
        return reply

    async def _await_text(self, sample: SampleId, seen: int) -> worker_pb2.AwaitTextReply:
        """Repeat the call over the next connection: the sampler still has the sample and all unread pieces."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + HOLD_SECONDS
        while True:
            try:
                return await self._dispatch.await_text(sample, seen, deadline)
            except Gone as error:
                raise WorkerUnavailable(f"the sampler has ended; send the request again ({error})") from error
            except WorkerUnavailable:
                if clock() >= deadline:
                    raise
            await asyncio.sleep(PAUSE_SECONDS)

    def release_quota(self, tenant: str, sample: SampleId) -> None:
        """Free the quota that the sample uses."""
        self._sampling.record_end(tenant, sample)

    async def cancel(self, sample: SampleId) -> None:
        """Cancel the sample. If the sampler cannot be reached, the sample ends by itself."""
        with contextlib.suppress(WorkerUnavailable):
            await self._dispatch.cancel(sample)

    async def _rendered(self, sampler: Sampler, prompt: Prompt) -> worker_pb2.RenderPromptReply:
        """Render a prompt. If a prompt consists of tokens, its text is empty.

        Rendering a prompt of tokens still returns the stop tokens.
        """
        if prompt.end_tokens:
            return worker_pb2.RenderPromptReply(tokens=prompt.tokens, end_tokens=prompt.end_tokens)
        need = Need(sampler.session.tenant, sampler.session.base_model, worker_id=sampler.worker_id)
        request = prompt.rendered or worker_pb2.RenderPromptRequest(text="")
        rendered = await _patiently(partial(self._dispatch.render, need, request))
        if prompt.rendered is None:
            rendered.tokens = prompt.tokens
        return rendered


class Generation:
    """The running sample of one prompt. The owner of this object must stop the sample."""

    def __init__(self, texts: Texts, tenant: str, sample: SampleId, prompt_tokens: int, weights: Weights) -> None:
        self._texts = texts
        self._tenant = tenant
        self._sample = sample
        self._is_over = False
        self.usage = TokenUsage(prompt=prompt_tokens)
        self.weights = weights
        self.drawn: Sequence[wire_pb2.SampledSequence] = ()
        """The drawn tokens of a recorded request, after the end of the sample."""

    async def pieces(self) -> AsyncIterator[Pieces]:
        """Yield the pieces until the sample ends.

        Raises Unprocessable for an invalid sample, and the sampler's errors.
        """
        seen = 0
        while not self._is_over:
            reply = await self._texts.pieces(self._sample, seen)
            seen += len(reply.pieces)
            self.usage.sampled = reply.sampled_tokens
            if reply.WhichOneof("state") == "end":
                self._is_over = True
                self.usage.cached = reply.end.prompt_cache_hit_tokens
                self.drawn = reply.end.sequences
            yield reply.pieces

    def release_quota(self) -> None:
        """Free the quota that the sample uses. Callers may call this method and `cancel` twice."""
        self._texts.release_quota(self._tenant, self._sample)

    async def cancel(self) -> None:
        """Cancel the sample if it has not ended."""
        if not self._is_over:
            await self._texts.cancel(self._sample)
        self._is_over = True


async def stop_all(generations: Sequence[Generation]) -> None:
    """Free the quota of all samples. Then cancel the samples that still run, all at the same time."""
    for generation in generations:
        generation.release_quota()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CANCEL_SECONDS):
            await asyncio.gather(*(generation.cancel() for generation in generations))


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat the call while the samplers are full, for the time that a client waits for an answer."""
    until = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while True:
        try:
            return await ask()
        except TooManySamples:
            if asyncio.get_running_loop().time() + PAUSE_SECONDS > until:
                raise
            await asyncio.sleep(PAUSE_SECONDS)


def _sample_request(
    request: TextRequest, prompt: Prompt, rendered: worker_pb2.RenderPromptReply
) -> worker_pb2.SampleRequest:
    params = request.params
    images = zip(rendered.image_positions, prompt.images, strict=True)
    return worker_pb2.SampleRequest(
        prompt_tokens=rendered.tokens,
        images=[worker_pb2.PromptImage(before_token=before, image=image) for before, image in images],
        num_samples=request.choices,
        max_tokens=params.max_tokens,
        seed=None if params.seed is None else params.seed % 2**64,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        has_stop=True,
        stop_strings=request.stops,
        stop_tokens=rendered.end_tokens,
        topk_sample_logprobs=request.logprobs or 0,
        prompt_logprobs=request.echo and request.logprobs is not None,
        topk_prompt_logprobs=(request.logprobs or 0) if request.echo else 0,
        reading=worker_pb2.Reading(
            chat=request.chat,
            tools=request.tools,
            logprobs=request.logprobs is not None,
            echo=request.echo,
            sequences=request.is_recorded,
        ),
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=request.logit_bias,
        constraint=request.constraint,
    )
