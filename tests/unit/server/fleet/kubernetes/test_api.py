"""A client of the Kubernetes API is closed for good, and reads whatever others have written."""

from __future__ import annotations

import json

import pytest
from tinsmith_server.fleet.kubernetes.api import SESSIONS, ApiUnavailable, KubernetesApi, parse_json


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
