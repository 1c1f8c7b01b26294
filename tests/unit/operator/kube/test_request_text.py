"""The API server reads what the operator sends as the operator meant it."""

from __future__ import annotations

import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from tinsmith_operator.kube.client import apply_patch, shortened, well_formed

TEXT = st.text(st.characters(), max_size=40)
"""Lone surrogates too, which `st.text()` alone leaves out."""
HALF_OF_A_PAIR = "\ud83d"


@given(text=TEXT, number=st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.none())
@example(text="\N{ROCKET} no", number=0)
@example(text="\x7f\x80\x85\u2028\ufeff\uffff\x00", number=None)
@example(text=HALF_OF_A_PAIR, number=True)
@example(text="\\\ud83d\\ude00", number=1)
def test_an_apply_read_as_yaml_is_the_manifest(text: str, number: int | None) -> None:
    manifest = {"spec": {"text": text, "number": number}, "list": [text]}
    assert yaml.safe_load(apply_patch(manifest)) == {
        "spec": {"text": well_formed(text), "number": number},
        "list": [well_formed(text)],
    }


@given(text=TEXT)
def test_an_apply_has_no_escape_of_a_surrogate_and_no_character_that_yaml_refuses(text: str) -> None:
    sent = apply_patch({"text": text})
    assert all(" " <= letter <= "~" or letter > "\uffff" for letter in sent)
    assert not any(0xD800 <= ord(letter) <= 0xDFFF for letter in yaml.safe_load(sent)["text"])


@given(text=TEXT, most_bytes=st.integers(3, 60))
def test_a_shortened_text_fits_the_byte_limit_and_is_a_prefix(text: str, most_bytes: int) -> None:
    short = shortened(text, most_bytes)
    assert len(short.encode()) <= most_bytes
    assert short == well_formed(text) or well_formed(text).startswith(short.removesuffix("…"))
