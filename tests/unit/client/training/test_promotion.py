"""The requests of a promotion, and the meaning of a server's refusal."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tinker
from tinsmith.training.errors import NotOffered, PromotionRefused
from tinsmith.training.promotion import explained, rollback, sampler_of_run

CHANGE = {"name": "prod", "model_path": "tinker://a", "time": "2026-01-01T00:00:00Z", "is_rollback": False}


class Server(ThreadingHTTPServer):
    """A server at which the name's last change has number 7. The answer to the first rollback is lost."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rollbacks: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asks_for_history = self.path == "/api/v1/promotions/prod"
        self._answer({"promotions": [CHANGE | {"number": 7}]} if asks_for_history else {})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"] or 0))
        if "/rollback" not in self.path:
            self._answer({})
            return
        self.server.rollbacks.append(self.path)
        if len(self.server.rollbacks) > 1:
            self._answer(CHANGE | {"number": 8, "is_rollback": True})

    def _answer(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def service(server: Server) -> Iterator[tinker.RestClient]:
    rest = tinker.RestClient(base_url=f"http://127.0.0.1:{server.server_port}", api_key="tml-test")
    yield rest
    rest.holder.run_coroutine_threadsafe(rest.holder.aclose()).future().result(10)


def test_a_rollback_that_the_sdk_repeats_says_again_which_change_it_takes_back(
    server: Server, service: tinker.RestClient
) -> None:
    """The server then rolls back once. Without the number it would go back two changes."""
    assert rollback("prod", service=service).number == 8
    assert server.rollbacks == ["/api/v1/promotions/prod/rollback?expected_number=7"] * 2


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, {"detail": "Not Found"}),
        (404, {"detail": "PUT /api/v1/promotions/prod: Not Found"}),
        (404, {"detail": "PUT /api/v1/promotions/prod: Not Found. This server has no such call."}),
        (405, {"detail": "Method Not Allowed"}),
        (404, None),
        (404, "<html>"),
    ],
)
def test_a_server_that_does_not_know_the_call_does_not_offer_it(status: int, body: object) -> None:
    assert isinstance(explained(status, body), NotOffered)


@pytest.mark.parametrize(("status", "sentence"), [(404, "you have no promoted name prod"), (422, "prod is one")])
def test_a_server_that_has_names_says_what_is_wrong(status: int, sentence: str) -> None:
    error = explained(status, {"detail": sentence})
    assert isinstance(error, PromotionRefused)
    assert str(error) == sentence


def test_a_refusal_that_is_not_about_names_is_left_to_the_sdk() -> None:
    assert explained(500, {"detail": "the store is read-only"}) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no summary.json: `tinsmith train` writes it when the run is finished"),
        ("{", "has no readable sampler"),
        ("[]", "has no readable sampler"),
        ("{}", "has no readable sampler: KeyError('sampler')"),
        ('{"sampler": null}', "has no sampler: its `sampler` is None"),
    ],
)
def test_a_folder_without_a_sampler_is_reported(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(PromotionRefused, match=re.escape(message)) as refused:
        sampler_of_run(tmp_path)
    assert str(tmp_path) in str(refused.value)


def test_the_sampler_of_a_finished_run_is_in_its_summary(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text('{"sampler": "tinker://run/sampler_weights/last"}')
    assert sampler_of_run(tmp_path) == "tinker://run/sampler_weights/last"
