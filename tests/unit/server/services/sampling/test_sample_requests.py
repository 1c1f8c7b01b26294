"""Any sample request of a client becomes a request to the worker, or is refused."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.services.sampling.sample_requests import sample_request

SESSION = "sess-1:sample:0"

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    "prompt",
    "num_samples",
    "sampling_params",
    "prompt_logprobs",
    "topk_sample_logprobs",
    "target_prompt_logprobs",
    "prompt_logprobs_last_n",
]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_no_body_breaks_the_translation(body: dict[str, object]) -> None:
    request = sample_request(SESSION, {"sampling_session_id": "sess-1:sample:0", "seq_id": 3, **body})
    assert request.sampling_session_id == SESSION
    assert request.HasField("rejection") or request.num_samples >= 1


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), st.integers(1, 4))
def test_chunks_are_joined_in_order(tokens: list[int], pieces: int) -> None:
    size = max(1, len(tokens) // pieces)
    chunks = [{"type": "encoded_text", "tokens": tokens[at : at + size]} for at in range(0, len(tokens), size)]
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": chunks}}
    assert memoryview(sample_request(SESSION, body).prompt_tokens).cast("i").tolist() == tokens


def test_a_negative_seed_is_one_of_64_bits() -> None:
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {"seed": -1}}
    assert sample_request(SESSION, body).seed == 2**64 - 1


@pytest.mark.parametrize("fields", [{"prompt_logprobs": True}, {"topk_prompt_logprobs": 2}, {"prompt_alt_tokens_k": 1}])
def test_a_sample_of_no_tokens_is_for_scoring_alone(fields: dict[str, object]) -> None:
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {"max_tokens": 0}}
    scored = sample_request(SESSION, body | fields)
    assert (scored.HasField("rejection"), scored.max_tokens) == (False, 0)
    assert "max_tokens: 0 is only for" in sample_request(SESSION, body).rejection.message


def test_any_numbers_of_a_tensor_reach_the_worker_or_are_refused() -> None:
    """The worker, which knows the prompt and the vocabulary, judges the tensor."""
    tensor = {"data": [-(2**63)], "dtype": "int64", "shape": [2**63 - 1], "sparse_crow_indices": []}
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}, "target_prompt_logprobs": tensor}
    assert "must be given together" in sample_request(SESSION, body).rejection.message
    tensor["sparse_col_indices"] = [-1]
    assert sample_request(SESSION, body).target_prompt_logprobs.shape == [2**63 - 1]


def prompt_of(*chunks: dict[str, object]) -> dict[str, object]:
    return {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": list(chunks)}}


def test_images_keep_their_place_among_the_texts_tokens() -> None:
    text = {"type": "encoded_text", "tokens": [1, 2]}
    picture = {"type": "image", "data": base64.b64encode(b"a picture").decode(), "format": "png", "expected_tokens": 8}
    asset = {"type": "image_asset_pointer", "location": "photos/cat.png", "format": "jpeg"}

    request = sample_request(SESSION, prompt_of(text, picture, text, asset, text))

    first, second = request.images
    assert memoryview(request.prompt_tokens).cast("i").tolist() == [1, 2, 1, 2, 1, 2]
    assert (first.before_token, first.image.data, first.image.expected_tokens) == (2, b"a picture", 8)
    assert (second.before_token, second.asset, second.image.HasField("expected_tokens")) == (4, "photos/cat.png", False)


@pytest.mark.parametrize(
    ("chunk", "sentence"),
    [
        ({"type": "image", "format": "png"}, "prompt chunk 0 is an image without data"),
        ({"type": "image", "format": "png", "data": "not base64!"}, "prompt.chunks.0.data: is not base64"),
        ({"type": "image_asset_pointer", "format": "png"}, "prompt chunk 0 points to an image without a location"),
        ({"type": "dmel", "dmel": ""}, "of type 'dmel' are not supported; send text and images"),
    ],
)
def test_an_image_that_is_none_is_refused_with_a_message(chunk: dict[str, object], sentence: str) -> None:
    assert sentence in sample_request(SESSION, prompt_of(chunk)).rejection.message
