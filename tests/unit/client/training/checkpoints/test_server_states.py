"""Servers without a call or without a checkpoint, through the real SDK over HTTP."""

from __future__ import annotations

import io
import json
import random
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tinker
from tinsmith.training.checkpoints.server_states import ServerStates
from tinsmith.training.errors import DownloadDamaged, NotOffered, StateGone

KEY = "tml-test"
STATE = "tinker://run:train:0/weights/step-000001"
EXPORT = "tinker://run:train:0/external_weights/step-000001"
BELOW = "/api/v1/training_runs/run:train:0/checkpoints"
ARCHIVE, LINKS = f"{BELOW}/weights/step-000001/archive", f"{BELOW}/external_weights/step-000001/external_weights_urls"


class Server(ThreadingHTTPServer):
    """A server that answers 200 for some paths, and 404 for all others."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: dict[str, bytes] = {"/api/v1/client/config": b"{}", "/api/v1/client/dynamic_config": b"{}"}
        self.redirects: dict[str, str] = {}
        self.redirect_status = 302
        self.deleted: list[str] = []
        self.requests: list[tuple[str, str | None]] = []
        """The requested paths, each with the key that was sent."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if length := int(self.headers.get("content-length") or 0):
            self.rfile.read(length)
        self.server.requests.append((self.path, self.headers.get("x-api-key")))
        if (location := self.server.redirects.get(self.path)) is not None:
            self._answer(self.server.redirect_status, b"", location)
        elif (body := self.server.bodies.get(self.path)) is not None:
            self._answer(200, body)
        else:
            self._answer(404, b'{"detail": "Not Found"}')

    def do_POST(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.server.deleted.append(self.path)
        self._answer(404, b'{"detail": "Not Found"}')

    def _answer(self, status: int, body: bytes, location: str | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if location is not None:
            self.send_header("location", location)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def running() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as server:
        yield server


@pytest.fixture
def states(server: Server) -> Iterator[ServerStates]:
    rest = tinker.RestClient(base_url=server.url, api_key=KEY)
    yield ServerStates(rest)
    # The SDK's background work would contact a server that is gone: its pauses are drawn from `random`, whose
    # state must not change while hypothesis draws.
    rest.holder.run_coroutine_threadsafe(rest.holder.aclose()).future().result(10)


def archive_of(files: Mapping[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return written.getvalue()


def test_an_optimizer_is_taken_from_the_archive_of_a_state(
    server: Server, states: ServerStates, tmp_path: Path
) -> None:
    server.redirects[ARCHIVE] = f"{server.url}/files"
    server.bodies["/files"] = archive_of({"adapter_model.safetensors": b"a", "optimizer.safetensors": b"moments"})
    states.fetch_optimizer(STATE, tmp_path / "moments")
    assert (tmp_path / "moments").read_bytes() == b"moments"


@pytest.mark.parametrize("status", [302, 308])
def test_a_key_stays_with_the_server_when_an_archive_is_elsewhere(
    server: Server, states: ServerStates, tmp_path: Path, status: int
) -> None:
    with running() as storage:
        server.redirect_status = status
        server.redirects[ARCHIVE] = f"{storage.url}/moved"
        storage.redirects["/moved"] = "/files"
        storage.bodies["/files"] = archive_of({"optimizer.safetensors": b"moments"})
        states.fetch_optimizer(STATE, tmp_path / "moments")
        assert storage.requests == [("/moved", None), ("/files", None)]
    assert (tmp_path / "moments").read_bytes() == b"moments"
    assert (ARCHIVE, KEY) in server.requests


@pytest.mark.parametrize("location", ["/nowhere", "ftp://elsewhere/files"])
def test_an_archive_with_a_broken_link_has_a_message(
    server: Server, states: ServerStates, tmp_path: Path, location: str
) -> None:
    server.redirects[ARCHIVE] = location
    with pytest.raises(DownloadDamaged, match="was not downloaded completely"):
        states.fetch_optimizer(STATE, tmp_path / "moments")


def test_an_incomplete_archive_is_reported(server: Server, states: ServerStates, tmp_path: Path) -> None:
    archive = archive_of({"optimizer.safetensors": bytes(3000)})
    flipped = bytearray(archive)
    flipped[-8] ^= 1  # of the digest
    for damaged in (archive[:-4], bytes(flipped)):
        server.bodies[ARCHIVE] = damaged
        with pytest.raises(DownloadDamaged, match="was not downloaded completely"):
            states.fetch_optimizer(STATE, tmp_path / "moments")


def test_an_archive_that_is_damaged_before_its_first_file_is_no_server_without_archives(
    server: Server, states: ServerStates, tmp_path: Path
) -> None:
    archive = bytearray(archive_of({"optimizer.safetensors": random.Random(0).randbytes(3000)}))
    archive[12] ^= 0xFF  # where what is compressed begins
    server.bodies[ARCHIVE] = bytes(archive)
    with pytest.raises(DownloadDamaged, match="was not downloaded completely"):
        states.fetch_optimizer(STATE, tmp_path / "moments")


def test_links_in_an_archive_are_passed_over(server: Server, states: ServerStates, tmp_path: Path) -> None:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as archive:
        for name in ("latest", "optimizer.safetensors"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, "elsewhere"
            archive.addfile(link)
        entry = tarfile.TarInfo("optimizer.safetensors")
        entry.size = 7
        archive.addfile(entry, io.BytesIO(b"moments"))
    server.bodies[ARCHIVE] = written.getvalue()
    states.fetch_optimizer(STATE, tmp_path / "moments")
    assert (tmp_path / "moments").read_bytes() == b"moments"


def test_a_dead_link_is_reported(server: Server, states: ServerStates, tmp_path: Path) -> None:
    urls = {name: f"{server.url}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")}
    server.bodies[LINKS] = json.dumps({"urls": urls, "expires": "2030-01-01T00:00:00Z"}).encode()
    with pytest.raises(DownloadDamaged, match="404"):
        states.fetch_adapter(EXPORT, tmp_path / "adapter")
    assert server.deleted == [f"{BELOW}/external_weights/step-000001"]


@pytest.mark.parametrize(
    "body",
    [None, archive_of({"adapter_model.safetensors": b"a"}), b'{"url": "elsewhere"}'],
    ids=["no such call", "an archive without it", "no archive"],
)
def test_a_server_that_gives_no_optimizer_is_one_sentence(
    server: Server, states: ServerStates, tmp_path: Path, body: bytes | None
) -> None:
    if body is not None:
        server.bodies[ARCHIVE] = body
    with pytest.raises(NotOffered, match=f"Save with optimizer=False: {STATE} has it"):
        states.fetch_optimizer(STATE, tmp_path / "moments")


def test_an_export_is_deleted_when_it_was_fetched(server: Server, states: ServerStates, tmp_path: Path) -> None:
    urls = {name: f"{server.url}/{name}" for name in ("adapter_config.json", "adapter_model.safetensors")}
    server.bodies[LINKS] = json.dumps({"urls": urls, "expires": "2030-01-01T00:00:00Z"}).encode()
    server.bodies |= {"/adapter_config.json": b'{"r": 8}', "/adapter_model.safetensors": b"weights"}
    assert states.fetch_adapter(EXPORT, tmp_path / "adapter") == {"r": 8}
    assert (tmp_path / "adapter").read_bytes() == b"weights"
    assert server.deleted == [f"{BELOW}/external_weights/step-000001"]


def test_an_export_in_another_layout_is_one_message_and_is_deleted(
    server: Server, states: ServerStates, tmp_path: Path
) -> None:
    server.bodies[LINKS] = json.dumps({"urls": {"w.bin": server.url}, "expires": "2030-01-01T00:00:00Z"}).encode()
    with pytest.raises(NotOffered, match=r"has no file adapter_config\.json; save with adapter=False"):
        states.fetch_adapter(EXPORT, tmp_path / "adapter")
    assert server.deleted == [f"{BELOW}/external_weights/step-000001"]


def test_a_missing_state_is_named_and_deleting_it_is_no_error(server: Server, states: ServerStates) -> None:
    with pytest.raises(StateGone, match=f"the server has no {STATE}: it was deleted or has expired"):
        states.require(STATE)
    states.delete(STATE)
    assert server.deleted == [f"{BELOW}/weights/step-000001"]
    server.bodies["/api/v1/weights_info"] = json.dumps({"base_model": "org/tiny", "is_lora": True}).encode()
    states.require(STATE)
