import asyncio
import sys
from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect, text
from support.server.store_records import a_session
from tinsmith_server.store import migrate
from tinsmith_server.store.connection import driver_url, parse_store_url
from tinsmith_server.store.store import open_store
from tinsmith_server.store.tables import metadata

pytestmark = pytest.mark.core


@pytest.fixture
def connection(store_url: str) -> Iterator[Connection]:
    """Connect to the database before any migration."""
    engine = create_engine(driver_url(parse_store_url(store_url)))
    with engine.connect() as connection:
        yield connection
    engine.dispose()


async def test_migrated_schema_and_tables_are_the_same(store_url: str, connection: Connection) -> None:
    await (await open_store(store_url)).close()

    context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})

    assert compare_metadata(context, metadata) == []


async def test_constraints_carry_their_conventional_names(store_url: str, connection: Connection) -> None:
    """A later migration can only drop what it can name, the same on both databases."""
    await (await open_store(store_url)).close()
    database = inspect(connection)

    for table in metadata.sorted_tables:
        assert database.get_pk_constraint(table.name)["name"] == f"pk_{table.name}"
        unique = {str(constraint["name"]) for constraint in database.get_unique_constraints(table.name)}
        foreign = {str(constraint["name"]) for constraint in database.get_foreign_keys(table.name)}
        assert all(name.startswith(f"uq_{table.name}_") for name in unique)
        assert all(name.startswith(f"fk_{table.name}_") for name in foreign)


async def test_processes_that_start_at_once_on_an_empty_database_all_come_up(store_url: str) -> None:
    program = """
import asyncio, sys
from tinsmith_server.store.store import open_store

async def main():
    store = await open_store(sys.argv[1])
    print((await store.secret("urls")).hex())
    await store.close()

sys.stdin.readline()
asyncio.run(main())
"""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program, store_url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        for _ in range(3)
    ]

    outputs = await asyncio.gather(*(process.communicate(b"go\n") for process in processes))

    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({stdout for stdout, _ in outputs}) == 1


async def test_a_failed_migration_leaves_nothing_behind(
    store_url: str, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = migrate.upgrade

    def breaks_at_the_end(connection: Connection) -> None:
        whole(connection)
        raise RuntimeError("the power went")

    monkeypatch.setattr(migrate, "upgrade", breaks_at_the_end)
    with pytest.raises(RuntimeError, match="the power went"):
        await open_store(store_url)
    assert inspect(connection).get_table_names() == []

    monkeypatch.undo()
    await (await open_store(store_url)).close()


async def test_a_store_at_the_newest_revision_opens_without_alembic(store_url: str) -> None:
    """Alembic's import and its load of the steps take longer than the rest of a store's opening."""
    await (await open_store(store_url)).close()
    program = """
import asyncio, sys
from tinsmith_server.store.store import open_store

async def main():
    await (await open_store(sys.argv[1])).close()

asyncio.run(main())
print("alembic" in sys.modules)
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, store_url), stdout=asyncio.subprocess.PIPE
    )

    assert (await process.communicate())[0] == b"False\n"


async def test_a_schema_of_a_newer_version_is_left_alone_and_used(store_url: str, connection: Connection) -> None:
    await (await open_store(store_url)).close()
    connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    connection.execute(text("ALTER TABLE sessions ADD COLUMN from_the_future TEXT"))
    connection.commit()

    older = await open_store(store_url)

    assert await older.create_session(a_session(), None) == await older.get_session("session-1")
    await older.close()
    assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
