"""What only a PostgreSQL store can do wrong."""

import asyncio
from urllib.parse import quote_plus

import pytest
from support.postgres import PostgresServer
from support.store_records import a_session
from tinsmith_server.store.engine import open_store
from tinsmith_server.store.errors import StoreUnavailable


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


async def test_times_mean_the_same_moment_whatever_the_servers_time_zone(postgres_url: str) -> None:
    store = await open_store(with_setting(postgres_url, "timezone=Asia/Tokyo"))
    try:
        stored = await store.create_session(a_session(), None)
    finally:
        await store.close()

    assert stored.created_at.isoformat() == "2026-03-01T12:00:00.123456+00:00"
