import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from support.server.store_records import NOW, a_model, a_session, later
from tinsmith_server.store import database
from tinsmith_server.store.connection import UnstorableValue
from tinsmith_server.store.store import Store, open_store

pytestmark = pytest.mark.core


async def cancelled(work: Coroutine[Any, Any, Any]) -> None:
    """Cancel `work` where it waits for the first time."""
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    assert task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_reopened_store_finds_everything_again(store_url: str) -> None:
    first = await open_store(store_url)
    session = await first.create_session(a_session(), "retry-1")
    model = await first.add_model(a_model())
    secret = await first.secret("urls")
    await first.close()

    second = await open_store(store_url)
    try:
        assert await second.create_session(a_session("session-2"), "retry-1") == session
        assert await second.get_model(model.model_id) == model
        assert await second.secret("urls") == secret
    finally:
        await second.close()


async def test_a_write_runs_to_its_end_when_its_caller_is_cancelled(store_url: str) -> None:
    first = await open_store(store_url)
    await cancelled(first.create_session(a_session(), None))
    await first.close()

    second = await open_store(store_url)
    assert await second.get_session("session-1") == a_session()
    await second.close()


async def test_a_caller_that_writes_repeatedly_queues_behind_waiting_callers(
    store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of connections favours the caller that asks at the right moment, and others would starve."""
    monkeypatch.setattr(database, "POSTGRESQL_WRITERS", 1)  # of several, one may be held up
    store = await open_store(store_url)
    await store.create_session(a_session(), None)
    turns = [0] * 100

    async def again_and_again(writer: int) -> None:
        while True:
            await store.heartbeat("session-1", later(writer))
            turns[writer] += 1

    flood = [asyncio.create_task(again_and_again(writer)) for writer in range(len(turns))]
    await asyncio.sleep(0)
    for _ in range(3):
        before = sum(turns)
        await store.heartbeat("session-1", later(0))
        assert sum(turns) - before <= len(flood) + 1
        assert max(turns) - min(turns) <= 1

    for writer in flood:
        writer.cancel()
    await asyncio.gather(*flood, return_exceptions=True)
    await store.close()


@pytest.mark.parametrize("text", ["nul \0", "half \ud800"], ids=["a NUL", "half a surrogate pair"])
async def test_text_that_no_row_can_hold_is_refused_alike(store: Store, text: str) -> None:
    with pytest.raises(UnstorableValue, match="NUL character or half of a surrogate"):
        await store.create_session(a_session(display_name=text), None)
    with pytest.raises(UnstorableValue):
        await store.get_model(text)

    assert (await store.list_sessions("ada", 10, 0)).total == 0


async def test_numbers_over_64_bits_are_refused_alike(store: Store) -> None:
    await store.create_session(a_session(), None)

    with pytest.raises(UnstorableValue, match="64 bits"):
        await store.add_model(a_model(model_seq_id=2**63))


async def test_a_time_without_a_zone_is_refused_alike(store: Store) -> None:
    with pytest.raises(UnstorableValue, match="no time zone"):
        await store.create_session(a_session(created_at=NOW.replace(tzinfo=None)), None)
