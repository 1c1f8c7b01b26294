"""What can go wrong with the store, said in sentences."""

from __future__ import annotations

from sqlalchemy.exc import DontWrapMixin

from tinsmith_server.errors import TinsmithError


class StoreError(TinsmithError):
    """Base of everything the store raises on purpose."""


class BadStoreUrl(StoreError):
    """The URL does not name a SQLite file or a PostgreSQL database."""


class StoreUnavailable(StoreError):
    """The database cannot be reached, opened or written now. The transaction did not happen, or its fate is unknown."""


class StoreUnreached(StoreUnavailable):
    """Nothing happened: there was no connection, or the transaction was refused."""


class StoreReadOnly(StoreUnreached):
    """The database takes no writes, and so nothing happened."""


class RowRefused(StoreError):
    """A constraint of the schema refused the row, for example a model of a session that does not exist."""


class UnstorableValue(StoreError, ValueError, DontWrapMixin):
    """No row can hold this value: NUL or a lone surrogate in text, more than 64 bits, NaN in JSON, a naive time."""
