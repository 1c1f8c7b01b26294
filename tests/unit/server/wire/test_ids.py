"""Identifiers are pure functions of what clients send, and can be read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_rpc import RELEASE_SEQ_ID
from tinsmith_server.wire.ids import (
    OperationId,
    SampleId,
    SamplingSessionName,
    check_name,
    parse_request_id,
    parse_sampling_session_id,
    parse_tinker_path,
    sampling_session_id_of,
)

owners = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60)


@given(owners, st.integers(0, RELEASE_SEQ_ID - 1))
def test_an_operation_is_found_again_from_its_request_id(model_id: str, seq_id: int) -> None:
    assert parse_request_id(str(OperationId(model_id, seq_id))) == OperationId(model_id, seq_id)


@given(owners, st.integers(0, 2**63 - 1))
def test_a_sample_is_found_again_from_its_request_id(sampling_session_id: str, seq_id: int) -> None:
    assert parse_request_id(str(SampleId(sampling_session_id, seq_id))) == SampleId(sampling_session_id, seq_id)


@pytest.mark.parametrize(
    "text",
    ["", "a", ":op:1", "m:op:", "m:op:01", "m:op:-1", "m:op:1.0", "m:op:²", f"m:op:{2**62}", "m:asample:x", "m:x:1"],
)
def test_what_was_never_answered_is_no_request_id(text: str) -> None:
    assert parse_request_id(text) is None


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text: str) -> None:
    parsed = parse_request_id(text)
    assert parsed is None or str(parsed) == text


@pytest.mark.parametrize("inflight", [False, True])
def test_a_sampling_session_says_whether_it_is_inflight(inflight: bool) -> None:
    made = sampling_session_id_of("sess-1", 3, inflight=inflight)
    assert parse_sampling_session_id(made) == SamplingSessionName("sess-1", 3, inflight)


def test_a_tinker_path_has_three_segments() -> None:
    path = parse_tinker_path("tinker://sess-1:train:0/sampler_weights/a.b")
    assert (path.run_id, path.type, path.name) == ("sess-1:train:0", "sampler", "a.b")
    assert str(path) == "tinker://sess-1:train:0/sampler_weights/a.b"


@pytest.mark.parametrize(
    "text", ["", "a/weights/b", "tinker://a/weights", "tinker://a/weights/b/c", "tinker://a//b", "tinker://a/other/b"]
)
def test_anything_else_is_no_tinker_path(text: str) -> None:
    with pytest.raises(ValueError, match="checkpoint"):
        parse_tinker_path(text)


@pytest.mark.parametrize("name", ["a", "step-000010", "Größe 3", "x" * 200, ".hidden"])
def test_a_name_may_be_nearly_anything(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["", "a/b", "a:b", ".", "..", "a\x00b", "a\nb", "x" * 201])
def test_a_name_is_one_path_segment(name: str) -> None:
    with pytest.raises(ValueError, match="checkpoint name"):
        check_name(name)
