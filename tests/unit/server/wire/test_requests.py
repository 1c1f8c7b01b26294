"""Errors of a body have a bounded length, and so has what is read of it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from tinsmith_server.wire.json_bodies import sentence
from tinsmith_server.wire.requests import CreateModelRequest, CreateSessionRequest, SampleRequest

MODEL = {"session_id": "s", "model_seq_id": 0, "base_model": "m"}
SAMPLE: dict[str, Any] = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}}


def message_of(model: type[CreateModelRequest | CreateSessionRequest | SampleRequest], body: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    return sentence(caught.value)


def test_three_errors_are_named_and_the_others_counted() -> None:
    words = message_of(CreateModelRequest, {**MODEL, "user_metadata": {f"key-{n}": n for n in range(100)}})
    assert words.count("should be a valid string") == 3
    assert words.endswith("; and 97 more")


def test_only_the_first_error_of_a_list_is_reported() -> None:
    assert "more" not in message_of(CreateSessionRequest, {"tags": [1] * 60})


def test_the_input_in_an_error_message_is_shortened() -> None:
    assert len(message_of(CreateModelRequest, {**MODEL, "user_metadata": {"k" * 5000: 1}})) < 1000


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({str(n): "" for n in range(129)}, "129 keys; at most 128"),
        ({"k": "v" * 8192}, "bytes as JSON; at most 8192"),
    ],
)
def test_metadata_has_few_keys_and_bytes(metadata: dict[str, str], message: str) -> None:
    assert message in message_of(CreateModelRequest, {**MODEL, "user_metadata": metadata})
    assert message in message_of(CreateSessionRequest, {"user_metadata": metadata})


@pytest.mark.parametrize("tokens", [["1"], [1.5], [None], [True], "1", 1, [2**63]])
def test_tokens_are_whole_numbers(tokens: object) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    assert "prompt.chunks.0.tokens" in message_of(SampleRequest, {**SAMPLE, "prompt": prompt})


def test_stops_are_few() -> None:
    assert "at most 1024 entries" in message_of(SampleRequest, {**SAMPLE, "sampling_params": {"stop": [1] * 1025}})
