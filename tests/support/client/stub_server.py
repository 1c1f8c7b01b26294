"""An HTTP server with answers that a test chooses, for clients that must handle any answer."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from typing_extensions import override

GOOD_KEY = "tml-good"

Answer = tuple[int, object]
"""A status and a body: a text is sent as it is, everything else as JSON."""

NOT_FOUND: Answer = (404, {"detail": "Not Found"})
WELL: Mapping[str, Answer] = {
    "/api/v1/healthz": (200, {"status": "ok"}),
    "/api/v1/client/config": (200, {}),
    "/api/v1/get_server_capabilities": (
        200,
        {"supported_models": [{"model_name": "org/tiny", "max_context_length": 4096, "images": False}]},
    ),
}


@contextmanager
def stub_server(
    answers: Mapping[str, Answer] = WELL, tls: ssl.SSLContext | None = None, received: list[Any] | None = None
) -> Iterator[str]:
    """Yield the base URL of a server that answers 401 to every key but GOOD_KEY, except on healthz.

    `received` gets the JSON bodies of requests.
    """
    bodies = [] if received is None else received
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(answers, bodies))
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler_for(answers: Mapping[str, Answer], received: list[Any]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            refused = not self.path.endswith("/healthz") and self.headers["X-API-Key"] != GOOD_KEY
            self._answer((401, {"detail": "no such key"}) if refused else answers.get(self.path, NOT_FOUND))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Type"] == "application/json":
                received.append(json.loads(body))
            self.do_GET()

        def _answer(self, answer: Answer) -> None:
            status, content = answer
            body = (content if isinstance(content, str) else json.dumps(content)).encode()
            with suppress(ConnectionError):  # a client that was interrupted has gone
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

    return Handler
