"""Links that were tampered with, and names that are paths: they lead to no file outside of the checkpoint."""

from __future__ import annotations

import asyncio
import base64
from urllib.parse import quote, unquote, urlsplit

import orjson
import pytest
from starlette.types import Message
from support.server.http_server import TestedServer

SECRET = b"a neighbouring file"
FILE = "adapter_config.json"


async def exported(server: TestedServer, name: str = "ex") -> str:
    """Return the link to a file of an export, as a path of the server."""
    model_id = await server.model()
    await server.outcome(await server.post("/save_weights_external", {"model_id": model_id, "seq_id": 1, "path": name}))
    data, directory = server.services.settings.data, server.newest_directory
    for folder in [directory, *directory.parents][1:]:
        if folder.is_relative_to(data):
            (folder / "secret").write_bytes(SECRET)
    (directory / "inner").mkdir()
    urls = await server.client.get(
        f"/training_runs/{model_id}/checkpoints/external_weights/{name}/external_weights_urls"
    )
    return urlsplit(urls.json()["urls"][FILE]).path


async def at(server: TestedServer, path: str) -> tuple[int, bytes]:
    """Return the answer to the unresolved path: clients in Python resolve its dots by themselves."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "server": ("test", 80),
        "client": ("127.0.0.1", 1),
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"test")],
    }
    sent: list[Message] = []
    bodies: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    await server.app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


UP = ("..", "%2e%2e", "%252e%252e", "..%2f..", "%c0%ae%c0%ae", "....", ".%00.")


@pytest.mark.parametrize("up", UP)
async def test_a_link_leads_to_no_file_outside_its_checkpoint(installation: TestedServer, up: str) -> None:
    link = await exported(installation)
    assert await at(installation, link) == (200, b"{}")
    folder = link.rsplit("/", 1)[0]
    for depth in range(1, 6):
        for path in ("/".join([up] * depth) + "/secret", "inner/" + "/".join([up] * (depth + 1)) + "/secret"):
            status, content = await at(installation, f"{folder}/{path}")
            assert (status, SECRET in content) == (404, False), path
    for path in ("/etc/passwd", "%2fetc%2fpasswd", "file:%2f%2f%2fetc%2fpasswd", "inner", "."):
        status, content = await at(installation, f"{folder}/{path}")
        assert (status, b"root:" in content) == (404, False), path


def decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


async def test_a_link_cannot_be_made_of_another_one(installation: TestedServer) -> None:
    link = await exported(installation)
    token = link.split("/")[-2]
    claim, mac = token.split(".")
    directory, expires = orjson.loads(decoded(claim))
    forged = {
        "another directory": f"{encoded(orjson.dumps(['', expires]))}.{mac}",
        "a longer life": f"{encoded(orjson.dumps([directory, expires + 1]))}.{mac}",
        "no signature": f"{claim}.",
        "a shorter signature": f"{claim}.{mac[:-4]}",
        "its own signature": f"{claim}.{claim}",
        "a claim of other types": f"{encoded(orjson.dumps({'a': [1]}))}.{mac}",
        "one part": claim,
        "three parts": f"{claim}.{mac}.{mac}",
        "no base64": f"{quote('ü' * 20)}.{mac}",
        "much": "A" * 20_000,
    }
    for what, one in forged.items():
        status, content = await at(installation, link.replace(token, one))
        assert (status, b"this download link is invalid" in content) == (404, True), what


PATHS_AS_NAMES = [
    "..",
    ".",
    "../up",
    "a/b",
    "a\\b",
    "/etc",
    "tinker://x",
    "a%2fb",
    "a\0b",
    "a\nb",
    "a?b",
    "a#b",
    "x" * 9999,
    "",
]
ODD_NAMES = ["-rf", "CON", " ", "a b", "~", "$(id)", "*", "ü", "😀", "..a", "a;b", "'", '"', "&", "="]


@pytest.mark.parametrize("call", ["save_weights", "save_weights_for_sampler", "save_weights_external"])
async def test_a_name_that_is_a_path_is_refused_and_an_odd_one_is_a_name(installation: TestedServer, call: str) -> None:
    server = installation
    model_id = await server.model()
    root = server.services.settings.data / "checkpoints"
    for seq_id, name in enumerate([*PATHS_AS_NAMES, *ODD_NAMES], start=1):
        outcome = await server.outcome(
            await server.post(f"/{call}", {"model_id": model_id, "seq_id": seq_id, "path": name})
        )
        if name in PATHS_AS_NAMES:
            assert outcome["category"] == "user", name
            continue
        assert outcome["path"].endswith(f"/{name}")
        directory = root / server.worker.events[-1].checkpoint_saved.directory
        assert directory.resolve().is_relative_to(root.resolve()), name
    kept = (await server.client.get("/checkpoints", params={"limit": 1000})).json()["checkpoints"]
    assert sorted(one["checkpoint_id"].partition("/")[2] for one in kept) == sorted(ODD_NAMES)
    for one in kept:
        url = f"/training_runs/{model_id}/checkpoints/{quote(one['checkpoint_id'])}"
        assert (await server.client.delete(url)).status_code == 200, one
