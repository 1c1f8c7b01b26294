from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.sampling.base import SamplingParams
from tinsmith_trainer.sampling.stops import StopRule
from tinsmith_trainer.sampling.token_text import LONGEST_WAIT_TOKENS, IncrementalText
from tinsmith_trainer.torch_model.loading import TorchModel

EOS = (7, 9)
texts = st.text(st.sampled_from("ab \n:Uéß漢🎉"), max_size=30)


@pytest.fixture(scope="module")
def tokenizer(model: TorchModel) -> Any:
    return model.tokenizer


def end_of(rule: StopRule, tokenizer: Any, tokens: list[int]) -> int | None:
    """Return the index of the token that ends the sequence."""
    watch = rule.watch(tokenizer, [])
    return next((index for index, token in enumerate(tokens) if watch.sees_end(token)), None)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), StopRule(frozenset(EOS), ())),
        (SamplingParams(stop_tokens=()), StopRule(frozenset(), ())),
        (SamplingParams(stop_strings=()), StopRule(frozenset(), ())),
        (SamplingParams(stop_tokens=(3,)), StopRule(frozenset({3}), ())),
        (SamplingParams(stop_tokens=(), stop_strings=()), StopRule(frozenset(), ())),
        (SamplingParams(stop_strings=("x",)), StopRule(frozenset(EOS), ("x",))),
        # As a request's strings come from the server.
        (SamplingParams(stop_tokens=(), stop_strings=("x",)), StopRule(frozenset(EOS), ("x",))),
        (SamplingParams(stop_tokens=(3,), stop_strings=("x",)), StopRule(frozenset({3}), ("x",))),
    ],
    ids=["unset", "no ids", "no strings", "ids", "nothing", "strings", "strings of the wire", "both"],
)
def test_ids_replace_the_end_of_sequence_tokens_and_strings_are_added_to_them(
    params: SamplingParams, expected: StopRule
) -> None:
    assert StopRule.of(params, EOS) == expected


@given(text=texts, stop=texts.filter(bool), data=st.data())
def test_a_stop_string_ends_where_the_decoded_text_first_holds_it(
    tokenizer: Any, text: str, stop: str, data: st.DataObject
) -> None:
    where = data.draw(st.integers(0, len(text)))
    tokens = tokenizer(text[:where] + stop + text[where:], add_special_tokens=False).input_ids
    decoded = [tokenizer.decode(tokens[: n + 1], clean_up_tokenization_spaces=False) for n in range(len(tokens))]
    expected = next(index for index, so_far in enumerate(decoded) if stop in so_far)
    assert end_of(StopRule(frozenset(), ("never said", stop)), tokenizer, tokens) == expected


@given(text=texts)
def test_the_pieces_of_a_text_are_the_text(tokenizer: Any, text: str) -> None:
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    pieces = IncrementalText(tokenizer)
    assert "".join(pieces.push(token) for token in tokens) == text


@given(st.lists(st.integers(0, 511), max_size=50))
def test_the_pieces_of_any_tokens_are_their_text_up_to_an_open_character(tokenizer: Any, tokens: list[int]) -> None:
    text = IncrementalText(tokenizer)
    joined = "".join(text.push(token) for token in tokens)
    whole = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert whole.startswith(joined)
    assert set(whole[len(joined) :]) == set() or whole.endswith("\ufffd")


def test_bytes_that_never_make_a_character_do_not_pile_up(tokenizer: Any) -> None:
    half = tokenizer("é", add_special_tokens=False).input_ids[0]
    stop = tokenizer("x", add_special_tokens=False).input_ids[0]
    text = IncrementalText(tokenizer)
    pieces = [text.push(half) for _ in range(3 * LONGEST_WAIT_TOKENS)]
    assert sum(bool(piece) for piece in pieces) == 3
    assert end_of(StopRule(frozenset(), ("x",)), tokenizer, [half] * 100 + [stop]) == 100
