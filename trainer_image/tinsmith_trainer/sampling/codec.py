"""The conversion of sample requests to jobs of the sampler, and of outcomes to Tinker's protobuf."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.sampling.base import (
    NO_TARGET,
    AltTokens,
    SampleJob,
    SampleOutcome,
    SamplingParams,
    Sequence,
    TopkLogprobs,
)
from tinsmith_trainer.sampling.checks import MOST_ECHOED_TEXTS, MOST_LOGPROBS
from tinsmith_trainer.wire.codec import decode_image
from tinsmith_trainer.wire.tensors import decode_tensor, encode_dense, encode_like
from tinsmith_trainer.wire.unknown_fields import unknown_fields_of

TARGETS: Final = "target_prompt_logprobs"
TARGET_BYTES = np.dtype(np.int64).itemsize
TOKEN_BYTES = np.dtype(np.int32).itemsize
ASSET_BYTES = 2**20
"""The estimated size of an image before it is read."""
CELL_BYTES = 8
"""The size in bytes of a target token, and of an ID with a logprob."""
TEXT_BYTES = 80
"""The size in bytes of a message with the text and the logprob of a token."""


def unpacked_bytes(request: worker_pb2.SampleRequest) -> int:
    """Return the memory for the job and the answer in bytes: prompt, images, targets, logprobs and echo."""
    shape = request.target_prompt_logprobs.shape if request.HasField(TARGETS) else ()
    cells = math.prod(shape) if len(shape) == 2 else 0  # other shapes are refused later
    positions = len(request.prompt_tokens) // TOKEN_BYTES
    cells += (request.topk_prompt_logprobs + request.prompt_alt_tokens_k) * positions
    cells += request.topk_sample_logprobs * request.num_samples * request.max_tokens
    images = sum(ASSET_BYTES if one.asset else len(one.image.data) for one in request.images)
    echo = request.reading.echo and request.reading.logprobs
    texts = request.num_samples * positions * (1 + request.topk_prompt_logprobs) if echo else 0
    unpacked = min(max(0, cells), MOST_LOGPROBS) * CELL_BYTES + min(max(0, texts), MOST_ECHOED_TEXTS) * TEXT_BYTES
    return len(request.prompt_tokens) + images + unpacked + request.constraint.ByteSize()


def decode_sample(request: worker_pb2.SampleRequest, tenant: str = "") -> SampleJob:
    """Decode a job without its constraint. The sampler checks later whether the job can run.

    Raises UserError for an invalid tensor, and ServerError if this release does not know a field of the request.
    """
    if reason := unknown_fields_of(request):
        raise ServerError(reason)
    return SampleJob(
        request_id=request.request_id,
        adapter_key=request.adapter.manifest_digest if request.adapter.directory else "",
        prompt=np.frombuffer(request.prompt_tokens, dtype="<i4"),
        params=_params(request),
        num_samples=request.num_samples,
        prompt_logprobs=request.prompt_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n if request.HasField("prompt_logprobs_last_n") else None,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=_targets(request.target_prompt_logprobs) if request.HasField(TARGETS) else None,
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
        tenant=tenant,
        images=tuple(
            decode_image(f"The prompt, image {index}", one.image, one.before_token)
            for index, one in enumerate(request.images)
        ),
    )


def encode_sample(outcome: SampleOutcome, request: worker_pb2.SampleRequest) -> bytes:
    """Encode a `SampleResponse`.

    The response always has one logprob per token. Logprobs of target tokens have the same tensor layout as the target
    tokens in the request.
    """
    message = wire_pb2.SampleResponse(
        sequences=[_sequence(sequence) for sequence in outcome.sequences],
        prompt_cache_hit_tokens=outcome.prompt_cache_hit_tokens,
    )
    if outcome.prompt_logprobs is not None:
        message.prompt_logprobs = outcome.prompt_logprobs.astype("<f4").tobytes()
    if outcome.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(outcome.topk_prompt_logprobs))
    if outcome.target_prompt_logprobs is not None:
        answer = encode_like(request.target_prompt_logprobs, outcome.target_prompt_logprobs)
        message.target_prompt_logprobs.CopyFrom(answer)
    if outcome.prompt_alt_tokens is not None:
        message.prompt_alt_tokens.CopyFrom(_alternatives(outcome.prompt_alt_tokens))
    return message.SerializeToString()


def _params(request: worker_pb2.SampleRequest) -> SamplingParams:
    return SamplingParams(
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        seed=request.seed if request.HasField("seed") else None,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        stop_tokens=tuple(request.stop_tokens) if request.has_stop else None,
        stop_strings=tuple(request.stop_strings) if request.has_stop else None,
        frequency_penalty=request.frequency_penalty,
        presence_penalty=request.presence_penalty,
        logit_bias=tuple(sorted(request.logit_bias.items())),
    )


def _targets(tensor: wire_pb2.Tensor) -> NDArray[np.int64]:
    decoded = decode_tensor(TARGETS, tensor, unlisted=NO_TARGET, most_bytes=MOST_LOGPROBS * TARGET_BYTES)
    if decoded.dtype != np.int64:
        raise UserError(f"{TARGETS} holds floats; it names tokens, so it must be int64.")
    return decoded.astype(np.int64, copy=False)


def _sequence(sequence: Sequence) -> wire_pb2.SampledSequence:
    return wire_pb2.SampledSequence(
        stop_reason=wire_pb2.STOP if sequence.stopped else wire_pb2.LENGTH,
        tokens=sequence.tokens.astype("<i4").tobytes(),
        logprobs=sequence.logprobs.astype("<f4").tobytes(),
        topk_sampled_logprobs=None if sequence.topk_logprobs is None else _topk(sequence.topk_logprobs),
    )


def _topk(topk: TopkLogprobs) -> wire_pb2.TopkLogprobs:
    length, k = topk.token_ids.shape
    return wire_pb2.TopkLogprobs(
        token_ids=topk.token_ids.astype("<i4").tobytes(),
        logprobs=topk.logprobs.astype("<f4").tobytes(),
        k=k,
        length=length,
    )


def _alternatives(alternatives: AltTokens) -> wire_pb2.PromptAltTokens:
    return wire_pb2.PromptAltTokens(
        tokens=encode_dense(alternatives.tokens), logprobs=encode_dense(alternatives.logprobs)
    )
