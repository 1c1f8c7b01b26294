"""From an `asample` body to the worker's request. What is wrong with it becomes a rejection."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from pydantic import ValidationError
from tinsmith_rpc import worker_pb2

from tinsmith_server.services.failures import rejection
from tinsmith_server.wire.ids import SampleId
from tinsmith_server.wire.requests import MAX_SAMPLES, ModelInput, SampleRequest, SamplingParams, sentence

TOKEN_LIMIT = 2**31


class Refused(Exception):
    """The message is for the user."""


def sample_request(sample: SampleId, body: dict[str, Any]) -> worker_pb2.SampleRequest:
    """Without its adapter, which the store knows."""
    try:
        request = SampleRequest.model_validate(body)
        _check_supported(request)
        return _request(sample, request)
    except ValidationError as error:
        return _rejected(sample, body, sentence(error))
    except Refused as error:
        return _rejected(sample, body, str(error))


def _request(sample: SampleId, request: SampleRequest) -> worker_pb2.SampleRequest:
    params = request.sampling_params
    message = worker_pb2.SampleRequest(
        request_id=str(sample),
        sampling_session_id=sample.sampling_session_id,
        prompt_tokens=_prompt_bytes(request.prompt),
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        seed=None if params.seed is None else params.seed % 2**64,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        prompt_logprobs=request.prompt_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
    )
    _set_stop(message, params)
    return message


def _set_stop(message: worker_pb2.SampleRequest, params: SamplingParams) -> None:
    """An absent stop means the end-of-sequence tokens; an empty list means that nothing stops."""
    message.has_stop = params.stop is not None
    for stop in [params.stop] if isinstance(params.stop, str) else params.stop or []:
        if isinstance(stop, str):
            message.stop_strings.append(stop)
        elif 0 <= stop < TOKEN_LIMIT:
            message.stop_tokens.append(stop)
        else:
            raise Refused(f"sampling_params.stop: {stop} is no token id")


def _prompt_bytes(prompt: ModelInput) -> bytes:
    """int32, little-endian, all chunks in a row."""
    tokens = array("i")
    for chunk in prompt.chunks:
        if chunk.type != "encoded_text":
            raise Refused(f"prompt chunks of type {chunk.type!r} are not supported yet by this server, only text")
        try:
            tokens.extend(chunk.tokens or [])
        except OverflowError:
            raise Refused("the prompt holds token ids outside 32 bits") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def _check_supported(request: SampleRequest) -> None:
    asked = {
        "topk_prompt_logprobs": request.topk_prompt_logprobs,
        "topk_sample_logprobs": request.topk_sample_logprobs,
        "target_prompt_logprobs": request.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": request.prompt_alt_tokens_k,
    }
    for name, value in asked.items():
        if value:
            raise Refused(f"{name} is not supported yet by this server")


def _rejected(sample: SampleId, body: dict[str, Any], message: str) -> worker_pb2.SampleRequest:
    """Still answered with as many sequence ids as were asked for, within reason."""
    count: object = body.get("num_samples", 1)
    return worker_pb2.SampleRequest(
        request_id=str(sample),
        sampling_session_id=sample.sampling_session_id,
        num_samples=count if type(count) is int and 0 <= count <= MAX_SAMPLES else 0,
        rejection=rejection(message),
    )
