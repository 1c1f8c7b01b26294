"""Whatever a client sends as a sample becomes a request for the worker, if only a refused one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.services.samples import sample_request
from tinsmith_server.wire.ids import SampleId

SAMPLE = SampleId("sess-1:sample:0", 3)

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
    "prompt_logprobs_last_n",
]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_no_body_breaks_the_translation(body: dict[str, object]) -> None:
    request = sample_request(SAMPLE, {"sampling_session_id": "sess-1:sample:0", "seq_id": 3, **body})
    assert request.request_id == str(SAMPLE)
    assert request.HasField("rejection") or request.num_samples >= 1


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20), st.integers(1, 4))
def test_chunks_are_joined_in_order(tokens: list[int], pieces: int) -> None:
    size = max(1, len(tokens) // pieces)
    chunks = [{"type": "encoded_text", "tokens": tokens[at : at + size]} for at in range(0, len(tokens), size)]
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": chunks}}
    assert memoryview(sample_request(SAMPLE, body).prompt_tokens).cast("i").tolist() == tokens


def test_a_negative_seed_is_one_of_64_bits() -> None:
    body = {"sampling_session_id": "s", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {"seed": -1}}
    assert sample_request(SAMPLE, body).seed == 2**64 - 1
