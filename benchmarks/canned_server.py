"""A server that knows by heart what a program hears while it makes a model: what is left is what the SDK itself takes.

Prints its port, and ends with its standard input.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL_ID = "sess-0:train:0"
ANSWERS: Mapping[str, Mapping[str, object]] = {
    "/api/v1/create_session": {"session_id": "sess-0"},
    "/api/v1/create_model": {"request_id": f"{MODEL_ID}:op:0", "model_id": MODEL_ID},
    "/api/v1/retrieve_future": {"model_id": MODEL_ID, "type": "create_model"},
    "/api/v1/get_info": {"model_id": MODEL_ID, "model_data": {"model_name": "bench/tiny"}, "lora_rank": 32},
}
"""By path; the others are answered with nothing, which is enough for the configuration and the end of a session."""


class Canned(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Head and body together: apart the second would wait for the client's acknowledgement of the first.
    wbufsize = -1

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.dumps(ANSWERS.get(self.path, {})).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Canned) as server:
        print(server.server_address[1], flush=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
