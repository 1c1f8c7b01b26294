"""The requests that `tinsmith import` sends to a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.client.stub_server import GOOD_KEY, WELL, Answer, stub_server
from tinsmith import api
from tinsmith.api import Api, RequestRefused
from typing_extensions import override

FINISH = "/api/v1/external_weights_upload_finish"
LOADING: Answer = (503, {"detail": "the base model is being loaded"})


class InTurn(dict[str, Answer]):
    """Answers to the successive requests that finish an upload."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__({**WELL, FINISH: answers[-1]})
        self._answers: Iterator[Answer] = iter(answers)

    @override
    def get(self, path: str, default: object = None) -> Any:
        return next(self._answers)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_SECONDS", 0.0)


@pytest.mark.parametrize("answer", [LOADING, (504, "<html>A proxy</html>")], ids=["loading", "a proxy's"])
def test_the_command_waits_for_a_long_import(answer: Answer) -> None:
    made = (200, {"tinker_path": "tinker://run/weights/adapter"})
    with stub_server(InTurn(answer, answer, made)) as url, Api(url, GOOD_KEY) as server:
        assert server.finish_upload("upload") == "tinker://run/weights/adapter"


def test_a_refusal_is_not_asked_again() -> None:
    refused = (422, {"detail": "the adapter has DoRA"})
    with (
        stub_server(InTurn(refused)) as url,
        Api(url, GOOD_KEY) as server,
        pytest.raises(RequestRefused, match="the adapter has DoRA"),
    ):
        server.finish_upload("upload")
