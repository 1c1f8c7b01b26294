"""What nests deeper than a parser goes is read without its depths, and everything else to the letter."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, web
from tinsmith_operator.kube.depth import DEEPEST, ReadableResponse, flattened, nests_too_deep, parse_json

DEEP = 9000
NESTED = '{"f:a":' * DEEP + "{}" + "}" * DEEP
LISTS = "[" * DEEP + "]" * DEEP
# Brackets and quotes in strings are none.
BESIDE = {"text": 'a "quoted" \\ { [ ]', "kept": [1, {"two": None}], "ü": True}


def beside(nested: str) -> str:
    return json.dumps({"before": BESIDE, "deep": "?", "after": BESIDE}).replace('"?"', nested)


@pytest.mark.parametrize("nested", [NESTED, LISTS, f"[{NESTED},{LISTS},1]"], ids=["objects", "lists", "both"])
def test_what_is_beside_a_deep_value_is_read_to_the_letter(nested: str) -> None:
    for text in (beside(nested), beside(nested).encode()):
        read = parse_json(text)
        assert (read["before"], read["after"]) == (BESIDE, BESIDE)
        assert read["deep"]


def test_an_object_that_was_too_deep_ends_at_the_deepest_level_that_is_kept() -> None:
    level, depth = parse_json(NESTED), 1
    while level:
        level, depth = level["f:a"], depth + 1
    assert depth == DEEPEST


@pytest.mark.parametrize("levels", [DEEPEST - 2, DEEPEST - 1, DEEPEST, 500])
def test_what_is_too_deep_is_known_whatever_the_parser_takes(levels: int) -> None:
    inner = '[{"a":' * (levels // 2) + "[" * (levels % 2) + "]" * (levels % 2) + "}]" * (levels // 2)
    assert nests_too_deep(inner.encode()) == (levels >= DEEPEST)
    assert (flattened(inner.encode()) == inner.encode()) == (levels < DEEPEST)


def test_what_is_not_too_deep_stays_as_it_is() -> None:
    text = beside('{"a":' * 90 + "[]" + "}" * 90).encode()
    assert not nests_too_deep(text)
    assert flattened(text) == text


@pytest.mark.parametrize("end", ["", "\\"], ids=["in a string", "behind a backslash"])
def test_an_answer_that_ends_in_a_string_of_quotes_is_told_in_linear_time(end: str) -> None:
    cut_off = "[" * DEEP + '"' + '\\"' * 1_000_000 + end
    with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
        parse_json(cut_off)


def test_what_is_no_json_is_said() -> None:
    with pytest.raises(ValueError, match="Expecting"):
        parse_json("<html>")


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Of a watch that tells of a deep object between two others, the last without its end; and of a list of them."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.Response(text=beside(NESTED), content_type="application/json")
        response = web.StreamResponse()
        await response.prepare(request)
        for line in (json.dumps(BESIDE), beside(NESTED), "{" * 600, json.dumps(BESIDE)):
            await response.write(line[:7].encode())
            await response.write(line[7:].encode() + b"\n")
        await response.write(b'{"cut":')
        return response

    application = web.Application()
    application.router.add_get("/", answer)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    await runner.cleanup()


async def test_a_response_can_be_read_by_a_parser_of_little_depth(address: str) -> None:
    async with ClientSession(response_class=ReadableResponse) as http:
        async with http.get(address) as response:
            assert (await response.json())["after"] == BESIDE
        async with http.get(f"{address}?watch=true") as response:
            whole = b"".join([chunk async for chunk in response.content.iter_chunked(1024)])
    first, deep, wrong, last, cut = whole.decode().split("\n")
    assert json.loads(first) == json.loads(last) == BESIDE
    assert json.loads(deep)["after"] == BESIDE
    assert (wrong, cut) == ("{" * 600, '{"cut":')
