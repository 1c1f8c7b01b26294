"""Requests of programs without an SDK. Plain requests have optional fields and simpler forms.

Plain requests are converted to the SDK's requests, so that no other module needs to know plain requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from tinsmith_server.wire.requests import MAX_SAMPLES, Count, Request, SamplingParams, SamplingSource, WholeNumbers

DEFAULT_TURNS, MOST_TURNS = 512, 4096
DEFAULT_RECORDING_BYTES, MOST_RECORDING_BYTES = 16 * 2**20, 64 * 2**20
DEFAULT_RECORDING_SECONDS, MOST_RECORDING_SECONDS = 24 * 3600, 7 * 24 * 3600


class InvalidPlainRequest(ValueError):
    """The request is invalid. The message is for the sender."""


class CreateSamplingClientRequest(SamplingSource):
    """A request for a sampling client without a session. The request has only the source of the samples."""


class DeleteModelRequest(Request):
    model_id: str


class PromoteRequest(Request):
    """A promotion.

    `expected_path` is the path to which the name must point now; null means that the name must be new.
    """

    model_path: str
    expected_path: str | None = None


class CreateRecordingRequest(Request):
    """A recording of an agent with a model: a base model, a tinker:// path of a saved sampler, or a promoted name."""

    model: str
    max_turns: int = Field(DEFAULT_TURNS, ge=1, le=MOST_TURNS)
    max_bytes: int = Field(DEFAULT_RECORDING_BYTES, ge=1, le=MOST_RECORDING_BYTES)
    ttl_seconds: int = Field(DEFAULT_RECORDING_SECONDS, ge=1, le=MOST_RECORDING_SECONDS)


class PlainSampleRequest(Request):
    """The schema of `/sample`: a sampling client or its source, and one prompt."""

    sampling_session_id: str | None = None
    base_model: str | None = None
    model_path: str | None = None
    prompt: WholeNumbers | dict[str, Any] | None = None
    prompts: list[WholeNumbers] | None = None
    num_samples: int = Field(1, ge=1, le=MAX_SAMPLES)
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0


def as_sdk_sample(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of an `asample`.

    The body has no sampling session and no number yet. Raises InvalidPlainRequest.
    """
    chunks = {"chunks": _chunks(_one_prompt(content))}
    params = _stops_in_one_place(content.get("sampling_params"))
    return {**content, "prompt": chunks, "sampling_params": params, "sampling_session_id": "", "seq_id": 0}


def _one_prompt(content: Mapping[str, Any]) -> object:
    prompts = content.get("prompts")
    if prompts is None:
        return content.get("prompt")
    if not isinstance(prompts, list) or len(prompts) != 1 or content.get("prompt") is not None:
        raise InvalidPlainRequest("prompts may contain only one prompt: send each prompt in a request of its own")
    return prompts[0]


def _chunks(prompt: object) -> object:
    """Return the chunks of a prompt in any form. Invalid chunks are kept, and make the sample's future fail."""
    if isinstance(prompt, dict):
        if "chunks" in prompt:
            return prompt["chunks"]
        prompt = prompt.get("tokens", prompt.get("input_ids"))
    if not isinstance(prompt, list | array):
        raise InvalidPlainRequest("prompt is a list of token ids, or an object with chunks, tokens or input_ids")
    return [{"type": "encoded_text", "tokens": prompt}]


def _stops_in_one_place(params: object) -> object:
    """Return the parameters, with `stop_token_ids` moved to `stop`. `stop` contains texts or IDs."""
    if params is None:
        return {}
    if not isinstance(params, dict) or params.get("stop_token_ids") is None:
        return params
    if params.get("stop") is not None:
        raise InvalidPlainRequest("sampling_params has stop and stop_token_ids: send one of them")
    return {**params, "stop": params["stop_token_ids"]}
