"""Lines of JSON that people have are read as they are: what ends a line, what begins a file, what says nothing."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith.training.json_lines import NoJson, numbered_lines, parse_line
from tinsmith.training.runs.json_lines import Text, parse_sft, read_examples

# All that `str.splitlines` cuts at, besides the line feed.
CUT_BY_PYTHON = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"


@given(
    texts=st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from(CUT_BY_PYTHON), min_size=1), min_size=1),
    mark=st.sampled_from(["", "\ufeff"]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_text_comes_back_under_its_line(
    texts: list[str], mark: str, end: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    file.write_bytes((mark + "".join(json.dumps(text, ensure_ascii=False) + end for text in texts)).encode())
    assert [(number, parse_line(line)) for number, line in numbered_lines(file)] == list(enumerate(texts, 1))


@pytest.mark.parametrize("value", ["\ud83d", ["\udc00 a"], {"text": {"deep": ["\ud800"]}}, {"\udfff": 1}])
def test_half_a_character_is_refused_by_its_escape(value: Any) -> None:
    with pytest.raises(NoJson, match=r"half of a character beyond U\+FFFF"):
        parse_line(json.dumps(value))


@pytest.mark.parametrize("line", ["[" * 100_000, "{", "nul"])
def test_what_is_no_json_is_said(line: str) -> None:
    with pytest.raises(NoJson, match="no JSON"):
        parse_line(line)


@pytest.mark.parametrize("depth", [100, 400, 900, 5_000, 100_000])
def test_any_depth_of_nesting_is_a_value_or_a_sentence(depth: int) -> None:
    with suppress(NoJson):
        assert parse_line("[" * depth + "]" * depth) is not None


def test_an_example_may_have_an_id_and_keys_without_a_value(tmp_path: Path) -> None:
    file = tmp_path / "examples.jsonl"
    file.write_text(json.dumps({"id": 7, "text": "a", "tools": [], "source": None}))
    assert [placed.example for placed in read_examples(file, parse_sft)] == [Text("a")]
