"""A model hub with one private repository: the parts that huggingface_hub needs to download a snapshot.

The program uses only the standard library, because it runs in pods: `python tiny_hub.py OWNER/NAME DIRECTORY PORT`.
HUB_TOKEN is the only accepted token.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
BRANCH = "main"


class TinyHub(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], repository: str, directory: Path, token: str) -> None:
        super().__init__(address, Handler)
        self.repository = repository
        self.directory = directory
        self.token = token


class Handler(BaseHTTPRequestHandler):
    server: TinyHub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            said = "Invalid credentials in Authorization header"
            self._refuse(HTTPStatus.UNAUTHORIZED, {"X-Error-Message": said})
            return
        path = unquote(urlsplit(self.path).path)
        api, files = f"/api/models/{self.server.repository}/", f"/{self.server.repository}/resolve/{COMMIT}/"
        if path == f"{api}revision/{BRANCH}":
            self._send_json({"id": self.server.repository, "sha": COMMIT})
        elif path == f"{api}tree/{COMMIT}":
            self._send_json([self._described(file) for file in sorted(self.server.directory.iterdir())])
        elif path.startswith(files) and (file := self.server.directory / path.removeprefix(files)).is_file():
            self._send_file(file)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, {"X-Error-Code": self._what_is_missing(path)})

    def _what_is_missing(self, path: str) -> str:
        if self.server.repository not in path:
            return "RepoNotFound"
        return "EntryNotFound" if COMMIT in path else "RevisionNotFound"

    def _described(self, file: Path) -> dict[str, object]:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _digest(file)}

    def _send_json(self, document: object) -> None:
        self._send(json.dumps(document).encode(), {"Content-Type": "application/json"})

    def _send_file(self, file: Path) -> None:
        self._send(file.read_bytes(), {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT})

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "0"}.items():
            self.send_header(name, value)
        self.end_headers()


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


if __name__ == "__main__":
    repository, directory, port = sys.argv[1:]
    TinyHub(("", int(port)), repository, Path(directory), os.environ["HUB_TOKEN"]).serve_forever()
