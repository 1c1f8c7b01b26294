"""A client of the Kubernetes API is closed for good, and reads whatever others have written."""

from __future__ import annotations

import json
import re

import pytest
from tinsmith_server.fleet.kubernetes.api import (
    SESSIONS,
    AlreadyThere,
    ApiRefused,
    ApiUnavailable,
    HistoryGone,
    KubernetesApi,
    error_of,
    parse_json,
)


async def test_a_request_after_the_end_opens_no_connection() -> None:
    api = KubernetesApi()
    await api.close()
    with pytest.raises(ApiUnavailable, match="stopping"):
        await api.list(SESSIONS, "team")


@pytest.mark.parametrize(
    "nested", ['{"f:a":' * 9000 + "{}" + "}" * 9000, "[" * 9000 + "]" * 9000], ids=["objects", "lists"]
)
def test_values_next_to_a_value_beyond_the_depth_of_a_parser_are_read_exactly(nested: str) -> None:
    """Anybody may write such managed fields into an object of theirs, and the API server keeps them."""
    neighbour = {"text": 'a "quoted" \\ { [ ]', "kept": [1, {"two": None}], "ü": True}
    text = json.dumps({"before": neighbour, "deep": "?", "after": neighbour}).replace('"?"', nested).encode()
    read = parse_json(text)
    assert (read["before"], read["after"]) == (neighbour, neighbour)
    assert read["deep"]
    with pytest.raises(ValueError, match="unexpected character"):
        parse_json(b"<html>")


@pytest.mark.parametrize(
    ("status", "content", "expected", "message"),
    [
        (410, {"message": "too old resource version"}, HistoryGone, "too old resource version"),
        (409, {"reason": "AlreadyExists", "message": "tiny-1 exists"}, AlreadyThere, "tiny-1 exists"),
        (401, {"message": "Unauthorized"}, ApiUnavailable, "answered GET /x with 401: Unauthorized"),
        (409, {"reason": "Conflict", "message": "modified"}, ApiUnavailable, "answered GET /x with 409: modified"),
        (503, b"<html>no backend</html>", ApiUnavailable, "answered GET /x with 503: <html>no backend</html>"),
        (502, b"[]", ApiUnavailable, r"answered GET /x with 502: \[\]"),
        (403, {"reason": "Forbidden", "message": "exceeded quota"}, ApiRefused, "exceeded quota"),
        (404, {}, ApiRefused, "answered GET /x with 404"),
    ],
)
def test_an_answer_is_an_outage_or_a_refusal_by_its_status(
    status: int, content: bytes | dict[str, str], expected: type[Exception], message: str
) -> None:
    """A call that met an outage is repeated, and a refused call is not."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    error = error_of(status, body, "GET /x")
    assert type(error) is expected
    assert re.search(message, str(error))
