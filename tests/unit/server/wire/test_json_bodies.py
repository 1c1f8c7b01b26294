"""Reading JSON in short steps: the same as reading it at once, and nothing that would take long."""

from __future__ import annotations

import base64
import re
from array import array
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.wire import json_bodies
from tinsmith_server.wire.json_bodies import PROMPT, BadJson, Shape, decode_base64, read_object

int64 = st.integers(-(2**63), 2**63 - 1)
leaves = st.none() | st.booleans() | int64 | st.text(max_size=20) | st.lists(int64, min_size=8, max_size=40)
objects = st.dictionaries(
    st.text(max_size=8),
    # Few leaves in each: some are long lists, and a hundred of them take minutes to draw.
    st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=10,
    ),
    max_size=6,
)


def plain(value: Any) -> Any:
    match value:
        case array():
            return value.tolist()
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list():
            return [plain(item) for item in value]
    return value


@given(objects, st.sampled_from([0, orjson.OPT_INDENT_2]), st.integers(16, 200))
def test_a_body_reads_as_orjson_reads_it_for_any_slices(content: dict[str, Any], layout: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bodies, "SLICE_BYTES", max(size, 48))
        assert plain(read_object(orjson.dumps(content, option=layout), PROMPT)) == content


@given(st.binary(max_size=200) | st.text('{}[],:"\\0123456789-. \n', max_size=200).map(str.encode))
def test_no_bytes_break_it_and_none_are_read_as_something_else(body: bytes) -> None:
    try:
        expected = orjson.loads(body)
    except orjson.JSONDecodeError:
        expected = None
    try:
        assert plain(read_object(body, PROMPT)) == expected
    except BadJson:
        assert not isinstance(expected, dict) or any(abs(n) >= 2**63 for n in map(int, re.findall(rb"\d+", body)))


@pytest.mark.parametrize("numbers", ["1,,2", "1,2,", ",1", "1 2", "01", "--1", "1-"])
def test_an_invalid_number_is_refused_in_a_long_list_too(numbers: str) -> None:
    body = b'{"a":[' + b"7," * 100 + numbers.encode() + b"]}"
    with pytest.raises(BadJson, match="is not JSON"):
        read_object(body, PROMPT)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        pytest.param(b'{"a":[' + b"{}," * 500_000 + b"{}]}", "besides its lists of whole numbers", id="empty objects"),
        pytest.param(b'{"a":' + b"[" * 3_000_000, "more than 8192 values", id="openings"),
        pytest.param(b'{"a":' + b"[" * 4000 + b"]" * 4000 + b"}", "more than 16 deep", id="depth"),
        pytest.param(
            b'{"a":[' + b"1.5," * 500_000 + b"1]}", "lists of tokens must contain whole numbers only", id="floats"
        ),
        pytest.param(b'{"a":[' + b'"",' * 900_000 + b'""]}', "more than 8192 values", id="texts"),
        pytest.param(b'{"a":"' + b"x" * 3_000_000 + b'"}', "a text of more than 524288 bytes", id="one text"),
        pytest.param(b'{"a":[' + b"1" * 3_000_000 + b"]}", "without a comma", id="one number"),
        pytest.param(b'{"a":[' + b"[1" + b",1" * 40 + b"]," * 50_000 + b"1]}", "more than 8192 values", id="lists"),
        pytest.param(b'{"a":[' + b"99999999999999999999," * 40 + b"1]}", "outside 64 bits", id="large numbers"),
    ],
)
def test_a_body_made_of_too_much_is_refused_in_a_sentence(body: bytes, message: str) -> None:
    with pytest.raises(BadJson, match=message):
        read_object(body, PROMPT)


@pytest.mark.parametrize("size", [10, 16_384, 65_536 * 3 + 10])
def test_long_image_data_is_read_together_with_other_content(size: int) -> None:
    """The limit is for bytes other than tokens and images: an image may have megabytes."""
    picture = bytes(range(256)) * (size // 256 + 1)
    text = base64.b64encode(picture).decode()
    content = {"chunks": [{"type": "image", "data": text}, {"tokens": list(range(100))}, {"data": text, "x": "y"}]}
    read = read_object(orjson.dumps(content), Shape(values=1000, bytes_without_numbers=40_000))
    for chunk in (read["chunks"][0], read["chunks"][2]):
        found = chunk["data"]
        assert decode_base64(found if isinstance(found, bytes) else found.encode()) == picture


@pytest.mark.parametrize("body", [b'{"other":"%s"}', b'{"data":"\\\\n%s"}', b'{"a":"\\"data\\":","b":"%s"}'])
def test_other_long_texts_are_read_as_text(body: bytes) -> None:
    assert list(read_object(body % (b"A" * 20_000), PROMPT).values())[-1].endswith("A" * 20_000)
