"""Creates that must wait: what they hear and when, what that costs, and who is served first."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.server.fake_fleet import BASE_MODEL, FakeFleet, FakeHandle
from support.server.http_server import TestedServer, client_of, running_server, running_servers, settings_for
from tinsmith_server.fleet.base import ServedModel
from tinsmith_server.store.database import Database

pytestmark = pytest.mark.core

SLOTS = 2
SUCCESS = {"reason": {"type": "success"}, "detail": None}


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFleet]:
    monkeypatch.setattr("tinsmith_server.services.training.placement.RECHECK_SECONDS", 0.05)
    monkeypatch.setattr("tinsmith_server.services.training.binding.FIRST_WORD_SECONDS", 0.2)
    monkeypatch.setattr("tinsmith_server.services.training.binding.ATTEMPT_SECONDS", 0.1)
    fleet = FakeFleet([ServedModel(BASE_MODEL, "tiny-1")], [FakeHandle("w1", "tiny-1", SLOTS)])
    fleet.capacity = "a session must end first"
    yield fleet
    fleet.cleanup()


@pytest.fixture
async def server(tmp_path: Path, fleet: FakeFleet) -> AsyncIterator[TestedServer]:
    async with running_server(settings_for(tmp_path), fleet) as server:
        yield server


@dataclass(frozen=True)
class Tenant:
    """Another one than the server's default, with a client of its own."""

    server: TestedServer
    client: httpx.AsyncClient

    async def create(self) -> dict[str, Any]:
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
        session_id = (await self.client.post("/create_session", json=session)).json()["session_id"]
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL}
        made: dict[str, Any] = (await self.client.post("/create_model", json=body)).json()
        return made

    async def result(self, request_id: str) -> httpx.Response:
        return await self.client.post("/retrieve_future", json={"request_id": request_id, "allow_metadata_only": False})

    async def get(self, request_id: str) -> None:
        """Get the model, and wait until it was made."""
        while (answer := await self.result(request_id)).status_code == 408:
            pass  # a busy machine may need longer than a first poll is held
        assert answer.status_code == 200, answer.text

    async def waiting(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = (await self.client.get("/waiting_models")).json()["waiting_models"]
        return listed


async def tenant(server: TestedServer, name: str) -> Tenant:
    key = await server.services.keys.create(name, "laptop")
    return Tenant(server, client_of(httpx.ASGITransport(server.app), key.secret))


async def finish(server: TestedServer, model_id: str) -> None:
    await server.post(f"/sessions/{model_id.split(':', maxsplit=1)[0]}/finish", SUCCESS)


async def test_a_create_that_must_wait_says_why_long_before_its_poll_is_over(server: TestedServer) -> None:
    """The user sees the reason at once: the SDK reports a mere pause only after a quarter of an hour."""
    held = [await server.model() for _ in range(SLOTS)]
    made = (await server.create_model(await server.session())).json()
    answer = await server.result(made["request_id"])
    assert (answer.status_code, answer.json()["queue_state"]) == (408, "paused_capacity")
    reason = answer.json()["queue_state_reason"]
    assert reason.startswith("waiting for one of 2 places of org/tiny; 2 held by your sessions ")
    assert answer.headers["x-deprecation-note"] == f"waiting: {reason}"
    second = asyncio.create_task(server.result(made["request_id"]))
    await finish(server, held[0])
    assert (await second).status_code == 200, "the next poll is held until there is an answer"


async def test_the_turn_that_a_create_hears_moves_while_it_waits(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_server(settings_for(tmp_path, poll_hold_seconds=0.3), fleet) as server:
        held = [await server.model() for _ in range(SLOTS)]
        made = []
        for _ in range(3):
            server.time.pass_seconds(1)
            made.append((await server.create_model(await server.session())).json())

        async def turn() -> str:
            reason: str = (await server.result(made[-1]["request_id"])).json()["queue_state_reason"]
            return reason.partition(" for ")[0]

        assert await turn() == "3rd of 3 waiting"
        await finish(server, held[0])
        while (heard := await turn()) == "3rd of 3 waiting":
            pass
        assert heard == "2nd of 2 waiting"


async def test_a_create_says_that_its_worker_loads_the_model(tmp_path: Path, fleet: FakeFleet) -> None:
    loading = "loading base model org/tiny, 12 s so far"
    fleet.handles["w1"].down = loading
    async with running_server(settings_for(tmp_path), fleet) as server:
        made = (await server.create_model(await server.session())).json()
        answer = await server.result(made["request_id"])
        assert (answer.status_code, answer.json()["queue_state_reason"]) == (408, loading)
        assert answer.headers["x-deprecation-note"] == f"waiting: {loading}"
        fleet.handles["w1"].down = None
        assert (await server.result(made["request_id"])).status_code == 200


@pytest.mark.core("GET /api/v1/waiting_models")
async def test_waiting_models_are_listed_to_their_own_tenant_at_every_replica(tmp_path: Path, fleet: FakeFleet) -> None:
    async with running_servers(settings_for(tmp_path), fleet) as (first, second):
        await first.model()
        bo = await tenant(first, "bo")
        for_bo = await bo.create()
        await bo.get(for_bo["request_id"])
        made = (await first.create_model(await first.session())).json()
        first.time.pass_seconds(90)
        for server in (first, second):
            [listed] = (await server.client.get("/waiting_models")).json()["waiting_models"]
            assert (listed["model_id"], listed["base_model"]) == (made["model_id"], BASE_MODEL)
            assert listed["waiting_seconds"] == 90
            assert listed["reason"].startswith("waiting for one of 2 places of org/tiny; 1 held by your session ")
            assert "1 held by other tenants" in listed["reason"]
            assert for_bo["model_id"].split(":")[0] not in listed["reason"]
        assert await bo.waiting() == []


async def test_polls_of_a_thousand_waiting_creates_read_the_store_no_more_than_one(
    tmp_path: Path, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.services.training.placement.RECHECK_SECONDS", 2.0)
    async with running_server(settings_for(tmp_path, poll_hold_seconds=0.5), fleet) as server:
        for _ in range(SLOTS):
            await server.model()
        made = (await server.create_model(await server.session())).json()
        ids = [made["model_id"], *copies_of(made["model_id"], tmp_path / "tinsmith.db", 999)]
        await server.services.binding.resume()

        async def poll(model_id: str) -> Any:
            return await server.services.futures.retrieve("default", f"{model_id}:op:0", allow_metadata_only=False)

        answers = await asyncio.gather(*map(poll, ids))
        assert [answer.reason.partition(" for ")[0] for answer in (answers[0], answers[-1])] == [
            "1st of 1000 waiting",
            "1000th of 1000 waiting",
        ]
        asked = count_store_accesses(monkeypatch)
        for _ in range(3):
            await asyncio.gather(*map(poll, ids))
        assert len(asked) < 100, "3,000 polls"


def copies_of(model_id: str, database: Path, count: int) -> list[str]:
    """Rows of more models of the same session, which were accepted after it."""
    with sqlite3.connect(database) as connection:
        cursor = connection.execute("SELECT * FROM models WHERE model_id = ?", (model_id,))
        row = dict(zip([column[0] for column in cursor.description], cursor.fetchone(), strict=True))
        session_id = row["session_id"]
        rows = [
            {**row, "model_id": f"{session_id}:train:{number}", "model_seq_id": number}
            for number in range(1000, 1000 + count)
        ]
        names = ", ".join(row)
        connection.executemany(f"INSERT INTO models ({names}) VALUES (:{', :'.join(row)})", rows)
    connection.close()
    return sorted(str(one["model_id"]) for one in rows)


def count_store_accesses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each transaction from here on."""
    asked: list[str] = []

    def counting(name: str) -> None:
        run = getattr(Database, name)

        async def counted(database: Database, work: Any) -> Any:
            asked.append(name)
            return await run(database, work)

        monkeypatch.setattr(Database, name, counted)

    counting("read")
    counting("write")
    return asked
