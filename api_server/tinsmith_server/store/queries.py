"""What the areas of the store share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Delete, Select, Table, Update
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.database import Database
from tinsmith_server.store.records import Page
from tinsmith_server.store.rows import (
    changes_rows,
    fetch_all,
    fetch_made,
    fetch_one,
    fetch_page,
    insert_unless_there,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


class Queries:
    """Base of each area: one transaction per call."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _read_one(self, record: type[R], query: Select[Any]) -> R | None:
        return await self._database.read(lambda connection: fetch_one(connection, record, query))

    async def _read_all(self, record: type[R], query: Select[Any]) -> list[R]:
        return await self._database.read(lambda connection: fetch_all(connection, record, query))

    async def _read_page(self, record: type[R], query: Select[Any], limit: int, offset: int) -> Page[R]:
        return await self._database.read(lambda connection: fetch_page(connection, record, query, limit, offset))

    async def _write(self, statement: Update | Delete) -> bool:
        """False when the statement touched no row."""
        return await self._database.write(lambda connection: changes_rows(connection, statement))

    async def _insert_or_find(self, record: type[R], table: Table, row: Mapping[str, Any], query: Select[Any]) -> R:
        """Inserts `row` unless a constraint of the table knows it already, and returns what `query` then finds."""

        async def insert_or_find(connection: AsyncConnection) -> R:
            await insert_unless_there(connection, table, row)
            return await fetch_made(connection, record, query)

        return await self._database.write(insert_or_find)
