"""What only a PostgreSQL store can do wrong."""

import pytest
from support.postgres import PostgresServer
from support.store_records import a_session
from tinsmith_server.store.engine import open_store
from tinsmith_server.store.errors import StoreUnavailable


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


async def test_times_mean_the_same_moment_whatever_the_servers_time_zone(postgres_url: str) -> None:
    store = await open_store(postgres_url.replace("options=", "options=-ctimezone%3DAsia%2FTokyo+"))
    try:
        stored = await store.create_session(a_session(), None)
    finally:
        await store.close()

    assert stored.created_at.isoformat() == "2026-03-01T12:00:00.123456+00:00"
