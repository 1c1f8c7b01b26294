"""The failures that only a PostgreSQL store can have."""

import asyncio
import threading
from urllib.parse import quote_plus

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection
from support.server.postgres import PostgresServer
from support.server.store_records import a_session, later
from tinsmith_server.store import database
from tinsmith_server.store.connection import StoreUnavailable
from tinsmith_server.store.store import Store, open_store

pytestmark = pytest.mark.slow("needs PostgreSQL")


def with_setting(url: str, setting: str) -> str:
    return url.replace("options=", f"options={quote_plus(f'-c{setting} ')}")


async def test_an_unreachable_server_is_one_clear_error_without_the_password() -> None:
    with pytest.raises(StoreUnavailable, match=r"ada:\*\*\*@127\.0\.0\.1:1/tinsmith is not available") as raised:
        await open_store("postgresql://ada:hunter2@127.0.0.1:1/tinsmith")

    assert "hunter2" not in str(raised.value)


async def test_a_server_that_dropped_its_connections_is_found_again(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    store = await open_store(postgres_url)
    try:
        await store.create_session(a_session(), None)
        postgres_server.drop_connections()

        assert await store.get_session("session-1") == a_session()
    finally:
        await store.close()


async def test_races_end_alike_where_the_database_defaults_to_serializable(postgres_url: str) -> None:
    store = await open_store(with_setting(postgres_url, "default_transaction_isolation=serializable"))
    try:
        attempts = [store.create_session(a_session(f"session-{number}"), "retry-1") for number in range(20)]
        made = await asyncio.gather(*attempts)
    finally:
        await store.close()

    assert len({session.session_id for session in made}) == 1


@pytest.mark.parametrize(("configured", "used"), [("off", "on"), ("on", "on"), ("remote_apply", "remote_apply")])
async def test_writes_are_durable_even_if_the_database_commits_asynchronously_by_default(
    postgres_url: str, configured: str, used: str
) -> None:
    store = await open_store(with_setting(postgres_url, f"synchronous_commit={configured}"))
    try:
        shown = await store._database.write(lambda connection: connection.scalar(text("SHOW synchronous_commit")))
    finally:
        await store.close()

    assert shown == used


async def test_times_mean_the_same_moment_in_any_time_zone_of_the_server(postgres_url: str) -> None:
    store = await open_store(with_setting(postgres_url, "timezone=Asia/Tokyo"))
    try:
        stored = await store.create_session(a_session(), None)
    finally:
        await store.close()

    assert stored.created_at.isoformat() == "2026-03-01T12:00:00.123456+00:00"


async def test_a_query_during_a_server_restart_waits_for_the_server(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 90.0)  # whatever a busy machine takes for the start
    store = await open_store(postgres_url)
    try:
        await store.create_session(a_session(), None)
        postgres_server.crash()
        waiting = asyncio.gather(store.get_session("session-1"), store.heartbeat("session-1", later(5)))
        with pytest.raises(StoreUnavailable, match="is not available"):
            await store.check()
        await asyncio.to_thread(postgres_server.start)

        found, beaten = await waiting
        assert found is not None
        assert beaten == a_session(last_heartbeat_at=later(5))
        await store.check()
    finally:
        await store.close()


async def test_a_stopped_server_is_one_clear_error_within_the_limit_and_serves_again_when_it_continues(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setitem(database._LIBPQ_DEFAULTS, "connect_timeout", "2")
    store = await open_store(postgres_url)
    try:
        await store.create_session(a_session(), None)
        await store.get_session("session-1")
        with postgres_server.stopped():
            with pytest.raises(StoreUnavailable, match=r"it has not answered for 0\.5 s; check whether"):
                await store.get_session("session-1")
            with pytest.raises(StoreUnavailable, match="is not available"):
                await store.heartbeat("session-1", later(5))
        monkeypatch.setattr(database, "ANSWER_SECONDS", 20.0)
        assert await store.get_session("session-1") == a_session()
        assert await store.heartbeat("session-1", later(7)) == a_session(last_heartbeat_at=later(7))
    finally:
        await store.close()


async def test_a_replica_that_stops_in_the_middle_of_a_write_holds_the_others_up_for_a_moment_only(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(database._LIMITS, "idle_in_transaction_session_timeout", "2s")
    monkeypatch.setitem(database._LIMITS, "lock_timeout", "60s")
    stopped, alive = await open_store(postgres_url), await open_store(postgres_url)
    in_the_middle, goes_on = threading.Event(), threading.Event()

    async def half(connection: AsyncConnection) -> None:
        await connection.execute(text("UPDATE sessions SET last_heartbeat_at = last_heartbeat_at"))
        in_the_middle.set()
        # Its thread stands still, and the loop does not.
        goes_on.wait()

    try:
        await stopped.create_session(a_session(), None)
        writing = asyncio.create_task(stopped._database.write(half))
        await asyncio.to_thread(in_the_middle.wait)
        beats = [alive.heartbeat("session-1", later(seconds)) for seconds in range(1, 21)]
        assert all(await asyncio.gather(*beats))
        goes_on.set()
        with pytest.raises(StoreUnavailable):
            await writing
    finally:
        goes_on.set()
        await alive.close()
        await stopped.close()


async def test_committed_rows_survive_a_crash_of_the_server(postgres_server: PostgresServer, postgres_url: str) -> None:
    store = await open_store(postgres_url)
    try:
        made = [await store.create_session(a_session(f"session-{number}"), None) for number in range(20)]
        postgres_server.crash()
        postgres_server.start()

        assert [await store.get_session(session.session_id) for session in made] == made
    finally:
        await store.close()


async def test_the_store_leaves_a_read_only_server_for_a_writable_one(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a fail-over, a proxy or a name may still lead to the old primary."""
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 0.5)
    store = await open_store(postgres_url)
    reader = await first_reader(store)
    try:
        await store.create_session(a_session(), None)
        with postgres_server.read_only():
            with pytest.raises(StoreUnavailable, match="accepts no writes"):
                await store.check()
            with pytest.raises(StoreUnavailable, match="read-only"):
                await store.heartbeat("session-1", later(5))
            with pytest.raises(StoreUnavailable, match="read-only"):
                await store.get_session("session-1")
        await store.check()
        assert await store.heartbeat("session-1", later(5)) == a_session(last_heartbeat_at=later(5))
        assert await first_reader(store) != reader, "a connection that reads from a standby was kept"
    finally:
        await store.close()


async def first_reader(store: Store) -> int:
    """Return the process of the database's that the store reads from."""
    read = store._database.read(lambda connection: connection.scalar(text("SELECT pg_backend_pid()")))
    process: int = await read
    return process


async def test_a_write_that_a_standby_refused_is_repeated_at_the_primary(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE_SECONDS", 90.0)
    store = await open_store(postgres_url)
    try:
        await store.create_session(a_session(), None)
        with postgres_server.read_only():
            beat = asyncio.create_task(store.heartbeat("session-1", later(5)))
            with pytest.raises(StoreUnavailable):
                await store.check()
        assert await beat == a_session(last_heartbeat_at=later(5))
    finally:
        await store.close()


async def test_patience_with_a_server_that_stays_away_ends(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_server.store.database.PATIENCE_SECONDS", 0.5)
    store = await open_store(postgres_url)
    postgres_server.crash()
    try:
        with pytest.raises(StoreUnavailable):
            await store.get_session("session-1")
        with pytest.raises(StoreUnavailable):
            await store.heartbeat("session-1", later(1))
    finally:
        postgres_server.start()
        await store.close()
