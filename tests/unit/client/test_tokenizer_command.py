"""`tinsmith tokenizer`, and the tokenizers of other commands: never from a hub."""

from __future__ import annotations

import io
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from tinsmith.base_models import (
    FILES,
    MOST_BYTES,
    TokenizerError,
    folder_of,
    kept,
    load_tokenizer,
    put,
    tokenizer_id,
    unpacked,
)
from tinsmith.cli import main
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from tinsmith_trainer.worker import tokenizer_files
from transformers import AutoTokenizer

pytestmark = pytest.mark.pytorch

TINY = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{}"}


def zipped(files: Mapping[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as into:
        for name, content in files.items():
            into.writestr(name, content)
    return archive.getvalue()


def status_of(arguments: list[str]) -> object:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


class Server(ThreadingHTTPServer):
    """A server that answers every request with one archive or a refusal, and records the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.answers: list[tuple[int, bytes]] = []
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Server)
        self.server.requests.append(self.path)
        status, body = self.server.answers[0] if len(self.server.answers) == 1 else self.server.answers.pop(0)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Server() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", "tml-key")
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_server_and_client_agree_on_the_files() -> None:
    assert frozenset(tokenizer_files.FILES) == FILES
    assert tokenizer_files.MOST_BYTES == MOST_BYTES


@pytest.mark.parametrize("model", ["demo/tiny", "tiny", "org/tiny:variant", "meta-llama/Llama-3.2-1B"])
def test_files_go_where_the_sdk_looks(server: Server, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = [(200, zipped(TINY))]
    assert status_of(["tokenizer", model]) == 0
    written = Path(tokenizer_id(model))
    assert {path.name: path.read_bytes() for path in written.iterdir()} == TINY
    assert server.requests == [f"/api/v1/models/{model.replace(':', '%3A')}/tokenizer"]
    assert f"{written}: 2 files written" in capsys.readouterr().out
    assert status_of(["tokenizer", model]) == 0
    assert "up to date" in capsys.readouterr().out


def test_files_of_the_user_are_replaced_only_on_request(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answers = [(200, zipped(TINY))]
    Path("tiny").mkdir()
    Path("tiny/tokenizer.json").write_bytes(b"mine")
    Path("tiny/weights").write_bytes(b"mine, too")
    assert status_of(["tokenizer", "tiny"]) == 1
    assert "tokenizer.json in tiny differs from the server's; use --replace" in capsys.readouterr().err
    assert not Path("tiny/tokenizer_config.json").exists()
    assert status_of(["tokenizer", "tiny", "--replace"]) == 0
    assert sorted(os.listdir("tiny")) == ["tokenizer.json", "tokenizer_config.json", "weights"]
    assert Path("tiny/tokenizer.json").read_bytes() == b"{}"


HOSTILE_NAMES = ["/etc/tiny", "..", "../tiny", "a/../../b", "", "./..", ".ssh", "~/tiny", "a\\b", "a\nb", "a/ b"]


@pytest.mark.parametrize("model", HOSTILE_NAMES)
def test_a_name_that_leads_elsewhere_writes_nothing(server: Server, model: str) -> None:
    with pytest.raises(TokenizerError, match="no files are written"):
        folder_of(model)
    server.answers = [(200, zipped(TINY))]
    assert status_of(["tokenizer", "--", model]) != 0
    assert server.requests == []
    assert os.listdir() == []


HOSTILE_ARCHIVES = {
    "a path": zipped(TINY | {"../evil": b""}),
    "an absolute path": zipped(TINY | {"/tmp/evil": b""}),
    "code": zipped(TINY | {"tokenization_tiny.py": b"evil()"}),
    "a folder": zipped(TINY | {"chat_template.jinja/": b""}),
    "no vocabulary": zipped({"tokenizer_config.json": b"{}"}),
    "a bomb": zipped(TINY | {"merges.txt": bytes(MOST_BYTES + 1)}),
    "no zip": b"<html>sign in</html>",
    "cut off": zipped(TINY)[:-10],
    "nothing": b"",
}


def twice() -> bytes:
    archive = io.BytesIO()
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(archive, "w") as into:
        into.writestr("tokenizer.json", b"a")
        into.writestr("tokenizer.json", b"b")
    return archive.getvalue()


@pytest.mark.parametrize("archive", [*HOSTILE_ARCHIVES.values(), twice()], ids=[*HOSTILE_ARCHIVES, "a name twice"])
def test_an_unexpected_archive_is_refused_as_a_whole(server: Server, archive: bytes, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError):
        unpacked(archive)
    with pytest.raises(TokenizerError):
        kept(archive)
    server.answers = [(200, archive)]
    assert status_of(["tokenizer", "tiny"]) == 1
    assert os.listdir() == []
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "tokenizer.json").symlink_to(outside)
    put(TINY, folder, replace=True)
    assert outside.read_bytes() == b"mine"
    assert not (folder / "tokenizer.json").is_symlink()


def test_a_request_is_retried_when_the_server_is_not_ready_and_not_when_it_refuses(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tinsmith.api.RETRY_SECONDS", 0.0)
    server.answers = [(503, b'{"detail": "it is being loaded"}'), (200, zipped(TINY))]
    assert status_of(["tokenizer", "tiny"]) == 0
    server.answers = [(404, b'{"detail": "there is no base model \'other\'"}')]
    server.requests.clear()
    assert status_of(["tokenizer", "other"]) == 1
    assert "there is no base model 'other'" in capsys.readouterr().err
    assert len(server.requests) == 1


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tokenizer") / "model")


def archive_of(model: Path) -> bytes:
    return zipped({path.name: path.read_bytes() for path in model.iterdir() if path.name in FILES})


def test_a_local_tokenizer_takes_precedence_over_the_servers(server: Server, tiny_model: Path) -> None:
    Path("private").mkdir()
    Path("private/model").symlink_to(tiny_model)
    found = load_tokenizer("private/model", server.url, "tml-key")
    assert found is not None
    assert found.name_or_path == "private/model"
    assert server.requests == []


def test_the_servers_tokenizer_is_kept_once_and_equal_to_the_models(
    server: Server, tiny_model: Path, tmp_path: Path
) -> None:
    server.answers = [(200, archive_of(tiny_model))]
    loaded = [load_tokenizer("private/model", server.url, "tml-key") for _ in range(2)]
    own = AutoTokenizer.from_pretrained(tiny_model)
    text = "<|im_start|>user\nHi 12+3<|im_end|>"
    for each in loaded:
        assert each is not None
        assert (each.encode(text), each.chat_template) == (own.encode(text), own.chat_template)
    assert len(list((tmp_path / "cache" / "tinsmith" / "tokenizers").iterdir())) == 1
    assert os.listdir() == [], "commands leave nothing in the folder of their user"


def test_a_server_without_the_tokenizer_leaves_the_search_to_the_sdk(server: Server) -> None:
    for status, body in ((404, b'{"detail": "Not Found"}'), (422, b'{"detail": "it has no tokenizer"}')):
        server.answers = [(status, body)]
        assert load_tokenizer("private/model", server.url, "tml-key") is None


def test_files_without_a_tokenizer_are_reported_without_a_request_to_a_hub(server: Server) -> None:
    server.answers = [(200, zipped({"tokenizer.json": b"nonsense", "config.json": b"{}"}))]
    with pytest.raises(TokenizerError, match="the tokenizer of private/model from"):
        load_tokenizer("private/model", server.url, "tml-key")


def test_a_file_longer_than_it_says_is_refused() -> None:
    archive = bytearray(zipped({"tokenizer.json": bytes(1000)}))
    at = archive.index(b"PK\x01\x02") + 24  # the size in the directory of the archive
    archive[at : at + 4] = (10).to_bytes(4, "little")
    with pytest.raises(TokenizerError):
        unpacked(bytes(archive))
