"""The conversion of an `asample` body to the worker's request. An invalid body becomes a rejection."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from tinsmith_rpc import wire_pb2, worker_pb2

from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.failures import rejection
from tinsmith_server.wire.ids import is_sample_number
from tinsmith_server.wire.json_bodies import pack, sentence
from tinsmith_server.wire.plain_requests import InvalidPlainRequest, as_sdk_sample
from tinsmith_server.wire.requests import (
    MAX_SAMPLES,
    Chunk,
    ModelInput,
    SampleRequest,
    SamplingParams,
    TokenTensor,
)

TOKEN_LIMIT = 2**31
TOKEN_BYTES = 4


class InvalidSampleRequest(Exception):
    """The request is invalid; the message is for the user."""


@dataclass(frozen=True, slots=True)
class SampleSubmission:
    """A sample request without the adapter, and the client's number for the sample."""

    seq_id: int
    request: worker_pb2.SampleRequest


def any_sample(body: dict[str, Any]) -> SampleSubmission | PlainSample:
    """Return the sample of an SDK, or a plain sample if it has no number. Raises Unprocessable."""
    return plain_sample(body) if body.get("seq_id") is None else sample_submission(body)


def sample_submission(body: dict[str, Any]) -> SampleSubmission:
    """Return the submission.

    Raises Unprocessable if the sampling session or the number is missing. Other errors make the future fail.
    """
    session_id, seq_id = body.get("sampling_session_id"), body.get("seq_id")
    if not isinstance(session_id, str) or not isinstance(seq_id, int) or not is_sample_number(seq_id):
        raise Unprocessable("sampling_session_id and seq_id are needed to identify the sample")
    return SampleSubmission(seq_id, sample_request(session_id, body))


@dataclass(frozen=True, slots=True)
class PlainSample:
    """A sample from a client without an SDK: its request and its source.

    The source is a sampling session or a model.
    """

    sampling_session_id: str | None
    base_model: str | None
    model_path: str | None
    request: worker_pb2.SampleRequest

    def content(self) -> list[str | None]:
        """Return the complete request as JSON, with a digest instead of the prompt."""
        request = self.request.SerializeToString(deterministic=True)
        return [self.base_model, self.model_path, hashlib.sha256(request).hexdigest()]


def plain_sample(content: dict[str, Any]) -> PlainSample:
    """Return the sample. Raises Unprocessable if the body has an unknown form. Other errors make the future fail."""
    named, base_model, model_path = map(content.get, ("sampling_session_id", "base_model", "model_path"))
    sources = (named, base_model, model_path)
    if not any(sources) or not all(isinstance(source, str | None) for source in sources):
        raise Unprocessable("sampling_session_id, base_model or model_path is needed as the source of the sample")
    try:
        body = as_sdk_sample(content)
    except InvalidPlainRequest as error:
        raise Unprocessable(str(error)) from error
    return PlainSample(named, base_model, model_path, sample_request("", body))


def sample_request(sampling_session_id: str, body: dict[str, Any]) -> worker_pb2.SampleRequest:
    """Return the request without its adapter and its ID. The adapter comes from the store.

    The ID depends on the sampler.
    """
    try:
        request = SampleRequest.model_validate(body)
        return _request(sampling_session_id, request)
    except ValidationError as error:
        return _rejected(sampling_session_id, body, sentence(error))
    except InvalidSampleRequest as error:
        return _rejected(sampling_session_id, body, str(error))


def _request(sampling_session_id: str, request: SampleRequest) -> worker_pb2.SampleRequest:
    params, targets = request.sampling_params, request.target_prompt_logprobs
    _check_not_empty(request)
    message = worker_pb2.SampleRequest(
        sampling_session_id=sampling_session_id,
        num_samples=request.num_samples,
        max_tokens=params.max_tokens,
        seed=None if params.seed is None else params.seed % 2**64,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        prompt_logprobs=request.prompt_logprobs,
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_sample_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else _tensor(targets),
        prompt_alt_tokens_k=request.prompt_alt_tokens_k,
    )
    _set_prompt(message, request.prompt)
    _set_stop(message, params)
    return message


def _check_not_empty(request: SampleRequest) -> None:
    scores = request.prompt_logprobs or request.topk_prompt_logprobs or request.prompt_alt_tokens_k
    if request.sampling_params.max_tokens == 0 and not scores and request.target_prompt_logprobs is None:
        raise InvalidSampleRequest(
            "sampling_params.max_tokens: 0 is only for a prompt's logprobs; request these, or 1 token or more"
        )


def _set_stop(message: worker_pb2.SampleRequest, params: SamplingParams) -> None:
    """Set the conditions at which a sequence stops.

    Without a condition, or with strings, the end-of-sequence tokens stop the sequence, too. An empty list means that
    there is no condition.
    """
    message.has_stop = params.stop is not None
    for stop in [params.stop] if isinstance(params.stop, str) else params.stop or []:
        if isinstance(stop, str):
            message.stop_strings.append(stop)
        elif 0 <= stop < TOKEN_LIMIT:
            message.stop_tokens.append(stop)
        else:
            raise InvalidSampleRequest(f"sampling_params.stop: {stop} is not a token id")


def _set_prompt(message: worker_pb2.SampleRequest, prompt: ModelInput) -> None:
    """Set the tokens of all text chunks as one int32 sequence, and the images at their positions."""
    texts: list[bytes] = []
    for index, chunk in enumerate(prompt.chunks):
        match chunk.type:
            case "encoded_text":
                texts.append(_token_bytes(chunk.tokens or ()))
            case "image" | "image_asset_pointer":
                message.images.append(_image(f"prompt chunk {index}", chunk, sum(map(len, texts)) // TOKEN_BYTES))
            case other:
                raise InvalidSampleRequest(f"prompt chunks of type {other!r} are not supported; send text and images")
    message.prompt_tokens = b"".join(texts)


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        return pack("i", tokens)
    except OverflowError:
        raise InvalidSampleRequest("the prompt contains token ids outside 32 bits") from None


def _image(where: str, chunk: Chunk, before_token: int) -> worker_pb2.PromptImage:
    """Return the image with its data, or with the location from which a sampler reads it."""
    image = wire_pb2.ImageChunk(format=chunk.format, expected_tokens=chunk.expected_tokens)
    if chunk.type == "image_asset_pointer":
        if not chunk.location:
            raise InvalidSampleRequest(f"{where} points to an image without a location")
        return worker_pb2.PromptImage(before_token=before_token, image=image, asset=chunk.location)
    if chunk.data is None:
        raise InvalidSampleRequest(f"{where} is an image without data")
    image.data = chunk.data
    return worker_pb2.PromptImage(before_token=before_token, image=image)


def _tensor(tokens: TokenTensor) -> wire_pb2.Tensor:
    """Return the tokens in the layout of the request. The answer has the layout of the request."""
    tensor = wire_pb2.Tensor(dtype=wire_pb2.INT64, shape=tokens.shape)
    if tokens.sparse_crow_indices is None or tokens.sparse_col_indices is None:
        tensor.dense = pack("q", tokens.data)
    else:
        tensor.sparse_csr.values = pack("q", tokens.data)
        tensor.sparse_csr.crow_indices = pack("q", tokens.sparse_crow_indices)
        tensor.sparse_csr.col_indices = pack("q", tokens.sparse_col_indices)
    return tensor


def _rejected(sampling_session_id: str, body: dict[str, Any], message: str) -> worker_pb2.SampleRequest:
    """Return the rejection of a request.

    The answer has as many sequence IDs as the request asked for, up to a limit.
    """
    count: object = body.get("num_samples", 1)
    return worker_pb2.SampleRequest(
        sampling_session_id=sampling_session_id,
        num_samples=count if type(count) is int and 0 <= count <= MAX_SAMPLES else 0,
        rejection=rejection(message),
    )
