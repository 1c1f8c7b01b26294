"""Identifiers are pure functions of what clients send, and can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import HIGHEST_CLIENT_SEQ_ID, PLAIN_SEQ_IDS, RELEASE_SEQ_ID
from tinsmith_server.wire.ids import (
    OperationId,
    SampleId,
    SamplingSessionName,
    check_name,
    parse_request_id,
    parse_sampling_session_id,
    parse_tinker_path,
    sampler_token,
    sampling_session_id_of,
)

owners = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)


NUMBERS = st.integers(0, HIGHEST_CLIENT_SEQ_ID) | st.integers(PLAIN_SEQ_IDS + 1, RELEASE_SEQ_ID)
"""The numbers of operations: from a client, or from a worker for a call without a number."""


@given(owners, NUMBERS)
def test_an_operation_is_found_again_from_its_request_id(model_id: str, seq_id: int) -> None:
    assert parse_request_id(str(OperationId(model_id, seq_id))) == OperationId(model_id, seq_id)


@given(owners, st.integers(0, 2**63 - 1), st.text())
def test_a_sample_and_the_sampler_that_took_it_are_found_again_from_its_request_id(
    sampling_session_id: str, seq_id: int, sampler_id: str
) -> None:
    sample = SampleId(sampling_session_id, seq_id, sampler_token(sampler_id))
    assert parse_request_id(str(sample)) == sample


def test_a_submission_has_the_same_sequences_wherever_it_is_taken() -> None:
    here, there = (SampleId("sess-1:sample:0", 3, sampler_token(sampler_id)) for sampler_id in ("one", "other"))
    assert str(here) != str(there)
    assert (
        here.sequence_ids(2) == there.sequence_ids(2) == ("sess-1:sample:0:asample:3:0", "sess-1:sample:0:asample:3:1")
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        ":op:1",
        "m:op:",
        "m:op:01",
        "m:op:-1",
        "m:op:1.0",
        "m:op:²",
        "m:op:1@01234567",
        f"m:op:{2**62 + 1}",
        f"m:op:{'9' * 5000}",
        "m:x:1",
        "m:asample:x@01234567",
        "m:asample:1",
        "m:asample:1@",
        "m:asample:1@0123456",
        "m:asample:1@0123456G",
        f"m:asample:{2**63}@01234567",
    ],
    ids=lambda text: text[:24],
)
def test_an_id_that_was_never_issued_is_not_a_request_id(text: str) -> None:
    assert parse_request_id(text) is None


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    parsed = parse_request_id(text)
    assert parsed is None or str(parsed) == text


@pytest.mark.parametrize("inflight", [False, True])
def test_a_sampling_session_says_whether_it_is_inflight(inflight: bool) -> None:
    made = sampling_session_id_of("sess-1", 3, inflight=inflight)
    assert parse_sampling_session_id(made) == SamplingSessionName("sess-1", 3, inflight)


@pytest.mark.parametrize(
    "name", ["", "a/b", "a:b", ".", "..", "a\x00b", "a\nb", "a#2", "a?", "a%41", "a\\b", "x" * 201]
)
def test_a_name_is_one_path_segment(name: str) -> None:
    with pytest.raises(ValueError, match="checkpoint name"):
        check_name(name)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("tinker://run/optimizer/a", "unknown kind of checkpoint; the kinds are weights, sampler_weights"),
        ("tinker://run/weights", "is not a checkpoint path"),
        ("tinker://run//a", "is not a checkpoint path"),
        ("s3://run/weights/a", "is not a checkpoint path"),
    ],
)
def test_a_path_of_no_checkpoint_is_refused_with_what_is_wrong(path: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_tinker_path(path)
