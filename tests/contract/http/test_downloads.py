"""Downloads of checkpoints: what arrives whole is what was saved; what was altered since is refused, or breaks off."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from support.server.http_server import TestedServer, one_server, record_answer

pytestmark = pytest.mark.core

WEIGHTS = "adapter_model.safetensors"
MIB = 2**20
LARGE = bytes(range(256)) * (5 * MIB // 256)


async def export(server: TestedServer, weights: bytes) -> str:
    """Save an export of these weights, and return its run."""
    server.worker.saved_files = {"adapter_config.json": b"{}", WEIGHTS: weights}
    model_id = await server.model()
    body = {"model_id": model_id, "seq_id": 1, "path": "ex"}
    await server.outcome(await server.post("/save_weights_external", body))
    return model_id


async def file_link(server: TestedServer, run: str, name: str = WEIGHTS) -> str:
    answer = await server.client.get(f"/training_runs/{run}/checkpoints/external_weights/ex/external_weights_urls")
    assert answer.status_code == 200, answer.text
    return urlsplit(answer.json()["urls"][name]).path


async def archive_link(server: TestedServer, run: str) -> str:
    address = f"/training_runs/{run}/checkpoints/external_weights/ex/archive"
    return urlsplit((await server.client.get(address)).headers["location"]).path


def replace_file(path: Path, content: bytes) -> None:
    """Another file under the name: the files of a checkpoint are read-only."""
    path.unlink()
    path.write_bytes(content)


@asynccontextmanager
async def over_a_socket(server: TestedServer) -> AsyncIterator[httpx.AsyncClient]:
    """Serve the application by a real HTTP server, which tells a response that ends early from a whole one."""
    http = uvicorn.Server(uvicorn.Config(server.app, port=0, lifespan="off", log_config=None))
    http.config.load()
    http.lifespan = http.config.lifespan_class(http.config)
    await http.startup()
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        hooks = {"response": [record_answer]}
        address = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=address, verify=False, event_hooks=hooks) as client:
            yield client
    finally:
        await http.shutdown()


@one_server
@pytest.mark.core(
    "GET /api/v1/archives/{token}",
    "GET /api/v1/downloads/{token}/{path}",
    "GET /api/v1/training_runs/{run_id}/checkpoints/{kind}/{name}/archive",
    "GET /api/v1/training_runs/{run_id}/checkpoints/external_weights/{name}/external_weights_urls",
    "POST /api/v1/save_weights_external",
)
async def test_files_and_archive_arrive_as_they_were_saved(server: TestedServer) -> None:
    run = await export(server, LARGE)
    file, archive = await file_link(server, run), await archive_link(server, run)
    async with over_a_socket(server) as client:
        fetched = await client.get(file)
        assert (fetched.headers["content-length"], fetched.content == LARGE) == (str(len(LARGE)), True)
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress((await client.get(archive)).content))) as tar:
            assert tar.extractfile(WEIGHTS).read() == LARGE  # type: ignore[union-attr]


@one_server
@pytest.mark.parametrize("content", [b"weightz", b"weight", b"weights and more", b""])
async def test_a_small_file_that_was_altered_is_refused_with_a_message(server: TestedServer, content: bytes) -> None:
    run = await export(server, b"weights")
    path = await file_link(server, run)
    replace_file(server.newest_directory / WEIGHTS, content)
    refused = await server.client.get(path.removeprefix("/api/v1"))
    assert refused.status_code == 422
    assert WEIGHTS in refused.json()["detail"]
    assert "use another checkpoint" in refused.json()["detail"]


@one_server
async def test_a_manifest_that_was_altered_opens_no_download(server: TestedServer) -> None:
    """An attacker who replaces a file can change the manifest, and cannot change the manifest's digest in the store."""
    run = await export(server, b"weights")
    file, archive = await file_link(server, run), await archive_link(server, run)
    manifest = server.newest_directory / "manifest.json"
    replace_file(manifest, manifest.read_bytes() + b" ")
    urls = f"/training_runs/{run}/checkpoints/external_weights/ex/external_weights_urls"
    for path in (file.removeprefix("/api/v1"), archive.removeprefix("/api/v1"), urls):
        refused = await server.client.get(path)
        assert (refused.status_code, "its manifest differs from the saved one" in refused.json()["detail"]) == (
            422,
            True,
        )


@one_server
@pytest.mark.parametrize("name", ["manifest.json", "stray"])
async def test_a_file_that_the_manifest_does_not_name_is_not_in_the_checkpoint(server: TestedServer, name: str) -> None:
    run = await export(server, b"weights")
    file, archive = await file_link(server, run), await archive_link(server, run)
    (server.newest_directory / "stray").write_bytes(b"not saved")
    fetched = await server.client.get(file.removeprefix("/api/v1").replace(WEIGHTS, name))
    assert fetched.status_code == 404
    whole = await server.client.get(archive.removeprefix("/api/v1"))
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(whole.content))) as tar:
        assert tar.getnames() == ["adapter_config.json", WEIGHTS]


async def test_a_link_outlives_the_key_that_made_it_and_ends_with_its_time_or_its_checkpoint(
    server: TestedServer,
) -> None:
    run = await export(server, b"abc")
    made = await server.services.keys.create("default", "for an hour")
    server.client.headers["X-API-Key"] = made.secret
    link, archive = await file_link(server, run), await archive_link(server, run)
    await server.services.keys.revoke(made.record.key_id)
    assert (await server.client.get(f"http://server{link}")).content == b"abc"
    assert (await server.client.get(f"http://server{archive}")).status_code == 200
    server.time.pass_seconds(server.services.settings.external_url_seconds + 1)
    for ended in (link, archive):
        assert (await server.client.get(f"http://server{ended}")).status_code == 404


@one_server
async def test_a_link_to_files_is_none_to_an_archive_nor_the_other_way_round(server: TestedServer) -> None:
    run = await export(server, b"weights")
    of_file, of_archive = await file_link(server, run), await archive_link(server, run)
    file_token, archive_token = of_file.split("/")[-2], of_archive.split("/")[-1]
    assert (await server.client.get(f"/archives/{file_token}")).status_code == 404
    assert (await server.client.get(f"/downloads/{archive_token}/{WEIGHTS}")).status_code == 404
