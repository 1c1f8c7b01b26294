"""Store URLs, and the errors that a store raises."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError, DontWrapMixin

from tinsmith_server.errors import TinsmithError


class StoreError(TinsmithError):
    """The base of the store's errors."""


class BadStoreUrl(StoreError):
    """The URL does not name a SQLite file or a PostgreSQL database."""


class StoreUnavailable(StoreError):
    """The database cannot be reached, opened or written. The transaction did not happen, or its outcome is unknown."""


class StoreUnreached(StoreUnavailable):
    """The transaction did not happen, because a connection was missing or refused."""


class StoreReadOnly(StoreUnreached):
    """The database accepts no writes, so the transaction did not happen."""


class RowRefused(StoreError):
    """A constraint of the schema refused the row, for example a model of a session that does not exist."""


class UnstorableValue(StoreError, ValueError, DontWrapMixin):
    """The value cannot be stored: NUL or a lone surrogate in text, more than 64 bits, NaN in JSON, or a naive time."""


_SHAPES = "sqlite:///relative/file.db, sqlite:////absolute/file.db or postgresql://user:password@host:5432/database"


def parse_store_url(text: str) -> URL:
    """Return the URL with `sqlite` or `postgresql` as its backend, without a driver.

    Raises BadStoreUrl. The error's message does not repeat the URL, because the URL may contain a password.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError) as error:
        raise BadStoreUrl(f"The store URL cannot be read. Write {_SHAPES}.") from error
    backend = url.drivername.partition("+")[0]
    if backend in ("postgresql", "postgres"):
        return url.set(drivername="postgresql")
    if backend == "sqlite":
        return _sqlite_file(url)
    raise BadStoreUrl(f"The store cannot live in {backend!r}. Write {_SHAPES}.")


def describe(url: URL) -> str:
    """Return the URL for logs and messages, without password and query."""
    return url.set(query={}).render_as_string(hide_password=True)


def driver_url(url: URL) -> URL:
    """Return the URL with its driver."""
    return url.set(drivername={"sqlite": "sqlite+pysqlite", "postgresql": "postgresql+psycopg"}[url.drivername])


def _sqlite_file(url: URL) -> URL:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:") or url.query:
        raise BadStoreUrl("A SQLite store is one plain file that outlives the server: write sqlite:///path/to/file.db.")
    if url.host:
        raise BadStoreUrl(f"The SQLite store URL has a host, {url.host!r}: write three slashes before a relative path.")
    return url.set(database=str(Path(url.database).absolute()))
