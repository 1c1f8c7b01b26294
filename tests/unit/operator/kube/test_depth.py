"""An object nested deeper than the parser's limit is truncated, and everything else is exact."""

from __future__ import annotations

import json

import pytest
from tinsmith_operator.kube.depth import DEEPEST, flattened, nests_too_deep, parse_json

DEEP = 9000
NESTED = '{"f:a":' * DEEP + "{}" + "}" * DEEP
LISTS = "[" * DEEP + "]" * DEEP
# Brackets and quotes in strings are none.
NEIGHBOUR = {"text": 'a "quoted" \\ { [ ]', "kept": [1, {"two": None}], "ü": True}


def with_neighbours(nested: str) -> str:
    return json.dumps({"before": NEIGHBOUR, "deep": "?", "after": NEIGHBOUR}).replace('"?"', nested)


@pytest.mark.parametrize("nested", [NESTED, LISTS, f"[{NESTED},{LISTS},1]"], ids=["objects", "lists", "both"])
def test_values_next_to_a_deep_value_are_read_exactly(nested: str) -> None:
    for text in (with_neighbours(nested), with_neighbours(nested).encode()):
        read = parse_json(text)
        assert (read["before"], read["after"]) == (NEIGHBOUR, NEIGHBOUR)
        assert read["deep"]


def test_an_object_that_was_too_deep_ends_at_the_deepest_level_that_is_kept() -> None:
    level, depth = parse_json(NESTED), 1
    while level:
        level, depth = level["f:a"], depth + 1
    assert depth == DEEPEST


@pytest.mark.parametrize("levels", [DEEPEST - 2, DEEPEST - 1, DEEPEST, 500])
def test_too_deep_values_are_found_without_the_parser(levels: int) -> None:
    inner = '[{"a":' * (levels // 2) + "[" * (levels % 2) + "]" * (levels % 2) + "}]" * (levels // 2)
    assert nests_too_deep(inner.encode()) == (levels >= DEEPEST)
    assert (flattened(inner.encode()) == inner.encode()) == (levels < DEEPEST)


def test_values_within_the_depth_limit_stay_unchanged() -> None:
    text = with_neighbours('{"a":' * 90 + "[]" + "}" * 90).encode()
    assert not nests_too_deep(text)
    assert flattened(text) == text


@pytest.mark.parametrize("end", ["", "\\"], ids=["in a string", "behind a backslash"])
def test_an_answer_that_ends_in_a_string_of_quotes_is_refused_in_linear_time(end: str) -> None:
    cut_off = "[" * DEEP + '"' + '\\"' * 1_000_000 + end
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        parse_json(cut_off)


def test_invalid_json_is_reported() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        parse_json("<html>")
