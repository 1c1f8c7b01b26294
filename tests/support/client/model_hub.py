"""As much of a model hub as one upload needs, on this machine: who is asking, a repository, one commit."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ModelHub:
    """`files` of each repository, as bytes by name, once they were committed."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.url = ""


@contextmanager
def model_hub() -> Iterator[ModelHub]:
    hub = ModelHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/api/whoami-v2":
                self.answer(200, {"name": "somebody", "type": "user"})
            else:
                self.answer(404)

        def do_HEAD(self) -> None:
            self.answer(404)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            what = self.path.split("/")
            if self.path == "/api/repos/create":
                wanted = json.loads(body)
                repository = f"{wanted.get('organization') or 'somebody'}/{wanted['name']}"
                hub.files[repository] = {}
                self.answer(200, {"url": f"{hub.url}/{repository}", "name": repository})
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "preupload" in what:
                names = [one["path"] for one in json.loads(body)["files"]]
                told = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
                self.answer(200, {"files": told})
            elif "commit" in what:
                repository, made = "/".join(what[3:5]), "0" * 40
                hub.files[repository].update(_files_of(body))
                self.answer(200, {"commitOid": made, "commitUrl": f"{hub.url}/{repository}/commit/{made}"})
            else:
                self.answer(404)

        def answer(self, status: int, content: Any = None) -> None:
            body = json.dumps(content or {"error": "no such thing"}).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _files_of(commit: bytes) -> dict[str, bytes]:
    """A commit is a line of JSON for each file."""
    lines = [json.loads(line) for line in commit.splitlines()]
    files = [line["value"] for line in lines if line["key"] == "file"]
    return {one["path"]: base64.b64decode(one["content"]) for one in files}
