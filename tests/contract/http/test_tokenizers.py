"""A base model's tokenizer: who gets it, what of it, and how often a worker is asked for its files."""

from __future__ import annotations

import asyncio
import io
import zipfile
from pathlib import Path

import httpx
import pytest
from support.server.fake_fleet import BASE_MODEL, OTHER_MODEL, FakeFleet
from support.server.http_server import TestedServer, one_server, running_server, settings_for

pytestmark = pytest.mark.core


async def get_tokenizer(server: TestedServer, model: str = BASE_MODEL, **headers: str) -> httpx.Response:
    return await server.client.get(f"/models/{model}/tokenizer", headers=headers)


def files_in(answer: httpx.Response) -> dict[str, bytes]:
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
    with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.core("GET /api/v1/models/{base_model}/tokenizer")
async def test_every_key_gets_the_tokenizer_of_a_base_model(server: TestedServer) -> None:
    server.worker.tokenizer["chat_template.jinja"] = "{{ ü }}".encode()
    assert files_in(await get_tokenizer(server)) == server.worker.tokenizer
    made = await server.services.keys.create("other", "theirs")
    assert files_in(await get_tokenizer(server, **{"X-API-Key": made.secret})) == server.worker.tokenizer


async def test_without_a_key_there_is_none(server: TestedServer) -> None:
    assert (await get_tokenizer(server, **{"X-API-Key": ""})).status_code == 401
    assert (await get_tokenizer(server, **{"X-API-Key": "tml-wrong"})).status_code == 401
    assert server.worker.tokenizers_sent == 0


@one_server
@pytest.mark.parametrize(
    "name", ["unheard/of", "..%2F..%2Fetc", "%2Fetc", "org/tiny/..", "org/tiny%00", "a" * 3000, "tinker://a/weights/b"]
)
async def test_a_name_that_is_not_a_base_model_is_not_found(server: TestedServer, name: str) -> None:
    missing = await get_tokenizer(server, name)
    assert missing.status_code == 404
    assert len(missing.text) < 700
    assert server.worker.tokenizers_sent == 0


@one_server
async def test_the_files_cross_to_the_server_once_and_again_when_they_change(server: TestedServer) -> None:
    first = await get_tokenizer(server)
    again = await asyncio.gather(*(get_tokenizer(server) for _ in range(5)))
    assert {answer.content for answer in again} == {first.content}
    assert server.worker.tokenizers_sent == 1
    server.worker.tokenizer["tokenizer.json"] = b'{"new": true}'
    assert files_in(await get_tokenizer(server))["tokenizer.json"] == b'{"new": true}'
    assert server.worker.tokenizers_sent == 2


@one_server
async def test_a_worker_that_does_not_answer_keeps_no_other_models_programs_waiting(server: TestedServer) -> None:
    server.worker.tokenizer_held = asyncio.Event()
    waiting = asyncio.create_task(get_tokenizer(server))
    other = await asyncio.wait_for(get_tokenizer(server, OTHER_MODEL), 30)
    assert files_in(other) == server.fleet.handles["other-1"].fake.tokenizer
    assert not waiting.done()
    server.worker.tokenizer_held.set()
    assert files_in(await waiting) == server.worker.tokenizer


async def test_while_no_worker_answers_it_is_a_503_that_can_be_repeated(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path), fleet) as server:
        server.handle.down = "its machine is gone"
        missing = await get_tokenizer(server)
        assert missing.status_code == 503
        assert "its machine is gone" in missing.json()["detail"]
        server.handle.down = None
        assert files_in(await get_tokenizer(server)) == server.worker.tokenizer
