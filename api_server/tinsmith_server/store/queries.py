"""What the areas of the store share: one statement, one transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import Delete, Select, Update

from tinsmith_server.store.database import Database
from tinsmith_server.store.records import Page
from tinsmith_server.store.rows import changes_rows, fetch_all, fetch_one, fetch_page

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")


class Queries:
    """Base of each area. Methods of several statements open their own transaction on `_database`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _read_one(self, record: type[R], query: Select[Any]) -> R | None:
        async with self._database.read() as connection:
            return await fetch_one(connection, record, query)

    async def _read_all(self, record: type[R], query: Select[Any]) -> list[R]:
        async with self._database.read() as connection:
            return await fetch_all(connection, record, query)

    async def _read_page(self, record: type[R], query: Select[Any], limit: int, offset: int) -> Page[R]:
        async with self._database.read() as connection:
            return await fetch_page(connection, record, query, limit, offset)

    async def _write(self, statement: Update | Delete) -> bool:
        """False when the statement touched no row."""
        async with self._database.write() as connection:
            return await changes_rows(connection, statement)
