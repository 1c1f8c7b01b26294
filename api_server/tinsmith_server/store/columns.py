"""Column types that accept and refuse the same values on SQLite and PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, Text
from sqlalchemy.types import TypeDecorator
from typing_extensions import override

from tinsmith_server.store.connection import UnstorableValue

_INT64 = range(-(2**63), 2**63)


class UtcTime(TypeDecorator[datetime]):
    """A datetime with a time zone, which is returned in UTC, to the microsecond.

    SQLite stores a time as text of fixed width in UTC, so that the order of texts is the order of times.
    """

    impl = DateTime(timezone=True)
    cache_ok = True

    @override
    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise UnstorableValue(f"The time {value.isoformat()} has no time zone; give an aware datetime.")
        utc = value.astimezone(UTC)
        return utc if dialect.name == "postgresql" else utc.replace(tzinfo=None)

    @override
    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class PlainText(TypeDecorator[str]):
    """Text without NUL and without lone surrogates.

    PostgreSQL can store neither NUL nor lone surrogates; SQLite would store NUL.
    """

    impl = Text
    cache_ok = True

    @override
    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is not None and ("\0" in value or not _is_unicode(value)):
            raise UnstorableValue(f"The text {value[:60]!a} contains a NUL character or half of a surrogate pair.")
        return value


class Int64(TypeDecorator[int]):
    """A signed 64-bit integer. The SDK's sequence numbers are far above 2^53."""

    impl = BigInteger
    cache_ok = True

    @override
    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        if value is not None and value not in _INT64:
            raise UnstorableValue(f"The number {value} does not fit into 64 bits.")
        return value


class JsonObject(TypeDecorator[Mapping[str, Any]]):
    r"""A JSON object that keeps the order of its keys. A missing object is NULL.

    The column type is `json`, because `jsonb` refuses \u0000 in strings.
    """

    impl = JSON(none_as_null=True)
    cache_ok = True

    @override
    def process_bind_param(self, value: Mapping[str, Any] | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else dict(value)


class JsonStrings(TypeDecorator[tuple[str, ...]]):
    """A tuple of strings, stored as a JSON array."""

    impl = JSON
    cache_ok = True

    @override
    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> list[str] | None:
        return None if value is None else list(value)

    @override
    def process_result_value(self, value: list[str] | None, dialect: Dialect) -> tuple[str, ...] | None:
        return None if value is None else tuple(value)


def to_json(value: object) -> str:
    """Return JSON that every database accepts. The JSON contains only ASCII, no NaN and no Infinity."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UnstorableValue(f"This is not JSON: {error}.") from error


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
