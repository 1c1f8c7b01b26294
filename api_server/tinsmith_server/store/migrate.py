"""The migration of a database to the schema of this version. Only one process at a time migrates."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from sqlalchemy import URL, Connection, Engine, NullPool, String, column, create_engine, inspect, select, table, text

from tinsmith_server.store.connection import StoreUnavailable, describe, driver_url
from tinsmith_server.store.database import (
    POSTGRESQL_ISOLATION,
    SQLITE_CONNECT_ARGS,
    postgresql_connect_args,
    prepare_sqlite,
    translate_errors,
)

_SCRIPTS = Path(__file__).parent / "migrations"

# Alembic's `op` and `context` are global to the process. Without the lock, two stores opened at once would share them.
_ONE_ALEMBIC_AT_A_TIME = threading.Lock()

# This is an arbitrary number that all replicas know, and that nothing else in the database uses.
_POSTGRESQL_ADVISORY_LOCK = 0x74696E736D697468

_log = structlog.get_logger()


def migrate(url: URL) -> None:
    """Create or update the schema. All steps run in one transaction, so a step that fails changes nothing."""
    with _ONE_ALEMBIC_AT_A_TIME, translate_errors(describe(url)):
        if url.drivername == "sqlite":
            _migrate_sqlite(url)
        else:
            _migrate_postgresql(url)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Run the missing steps up to `revision`, in the transaction that is open on the connection.

    A schema that this version does not know was made by a newer version, and stays unchanged. This version can still
    use a newer schema, because migration steps only add to the schema until every replica is new
    (`migrations/README.md`).
    """
    present, known = _revision_of(connection), known_revisions()
    if present == known[-1]:
        return
    if present is not None and present not in known:
        _log.warning("store_schema_is_newer", schema=present)
        return
    # The import is deferred. Importing and loading the steps takes longer than the rest of a start, and few starts need
    # them.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def known_revisions() -> list[str]:
    """Return the revisions of this version, oldest first.

    The revisions are in the file names of the migration steps.
    """
    return sorted(file.name[1:5] for file in (_SCRIPTS / "versions").glob("v*.py"))


def _revision_of(connection: Connection) -> str | None:
    """Return the revision of the database, or None if the database is empty."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.scalar(select(column("version_num", String)).select_from(table("alembic_version")))


def _migrate_sqlite(url: URL) -> None:
    path = Path(str(url.database))
    if not path.parent.is_dir():
        raise StoreUnavailable(f"The directory {path.parent} for the store does not exist. Create it, or name another.")
    engine = create_engine(driver_url(url), poolclass=NullPool, connect_args=SQLITE_CONNECT_ARGS)
    prepare_sqlite(engine, "BEGIN IMMEDIATE", "journal_mode=WAL")
    # BEGIN IMMEDIATE would suffice for the steps, but two processes that switch a new file to WAL at once fail with
    # "database is locked", even with a long busy timeout.
    with _locked_file(path):
        _upgrade_in_one_transaction(engine)


def _migrate_postgresql(url: URL) -> None:
    engine = create_engine(
        driver_url(url),
        poolclass=NullPool,
        isolation_level=POSTGRESQL_ISOLATION,
        connect_args=postgresql_connect_args(url),
    )
    _upgrade_in_one_transaction(engine)


def _upgrade_in_one_transaction(engine: Engine) -> None:
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _POSTGRESQL_ADVISORY_LOCK})
        upgrade(connection)


@contextmanager
def _locked_file(path: Path) -> Iterator[None]:
    """Hold a lock on a file in the folder of the database file.

    Make the database file readable only for its user, because it contains secrets.

    SQLite gives its write-ahead log the mode of the database file.
    """
    try:
        path.touch(mode=0o600)
        file = path.with_name(path.name + ".lock").open("a")
    except OSError as error:
        raise StoreUnavailable(f"The store's file cannot be written: {error}.") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
