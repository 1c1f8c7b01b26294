"""The base class of all queries. The class converts between records and rows, and each call is one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Delete,
    Executable,
    Row,
    Select,
    Table,
    Update,
    func,
    literal,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from tinsmith_server.store.database import Database
from tinsmith_server.store.records import Page

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R", bound="DataclassInstance")

StatementParameters: TypeAlias = Mapping[str, Any] | None
"""The parameters of a statement.

Statements with parameters are built only once, because building takes longer than the query.
"""

_INSERT = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class Queries:
    """The base class of each group of queries. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _look_up(self, record: type[R], query: Select[Any], parameters: StatementParameters = None) -> R | None:
        """Return the row that the key selects, or None."""
        return await self._database.look_up(lambda connection: fetch_one(connection, record, query, parameters))

    async def _read_all(self, record: type[R], query: Select[Any]) -> list[R]:
        return await self._database.read(lambda connection: fetch_all(connection, record, query))

    async def _read_ids(self, query: Select[Any]) -> Sequence[str]:
        """Return the values of the only column."""

        async def read(connection: AsyncConnection) -> Sequence[str]:
            return [str(row[0]) for row in await connection.execute(query)]

        return await self._database.read(read)

    async def _read_page(self, record: type[R], query: Select[Any], limit: int, offset: int) -> Page[R]:
        return await self._database.read(lambda connection: fetch_page(connection, record, query, limit, offset))

    async def _count(self, query: Select[Any], parameters: StatementParameters = None) -> int:
        return await self._database.read(lambda connection: count(connection, query, parameters))

    async def _write(self, statement: Update | Delete, parameters: StatementParameters = None) -> bool:
        """Run the statement. Returns False if the statement changed no row."""
        return await self._database.write(lambda connection: changes_rows(connection, statement, parameters))

    async def _insert_or_find(
        self,
        record: type[R],
        table: Table,
        row: Mapping[str, Any],
        query: Select[Any],
        parameters: StatementParameters = None,
    ) -> R:
        """Insert `row`. If a unique constraint refuses the row, return the row that `query` finds."""

        async def insert_or_find(connection: AsyncConnection) -> R:
            await insert_unless_there(connection, table, row)
            return await fetch_made(connection, record, query, parameters)

        return await self._database.write(insert_or_find)


def values(record: DataclassInstance) -> dict[str, Any]:
    """Return the values of the record by field, without copying them."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def to_record(record: type[R], row: Row[Any]) -> R:
    """Return the record. `row` has a column for every field; other columns are ignored."""
    return record(**{field.name: row._mapping[field.name] for field in fields(record)})


@cache
def select_records(table: Table, record: type[R]) -> Select[Any]:
    """Return a select of the record's fields.

    The statement is built once, because building takes longer than the query.
    """
    return select(*(table.c[field.name] for field in fields(record)))


async def fetch_one(
    connection: AsyncConnection, record: type[R], query: Select[Any], parameters: StatementParameters = None
) -> R | None:
    row = (await connection.execute(query, parameters)).one_or_none()
    return None if row is None else to_record(record, row)


async def fetch_made(
    connection: AsyncConnection, record: type[R], query: Select[Any], parameters: StatementParameters = None
) -> R:
    """Return the only row. This transaction has inserted or found the row."""
    return to_record(record, (await connection.execute(query, parameters)).one())


async def count(connection: AsyncConnection, query: Select[Any], parameters: StatementParameters = None) -> int:
    return int(await connection.scalar(query, parameters) or 0)


async def fetch_all(
    connection: AsyncConnection, record: type[R], query: Select[Any], parameters: StatementParameters = None
) -> list[R]:
    return [to_record(record, row) for row in await connection.execute(query, parameters)]


async def fetch_page(
    connection: AsyncConnection, record: type[R], query: Select[Any], limit: int, offset: int
) -> Page[R]:
    """Return a page. `query` has an order and no limit; `total` counts all rows of the query."""
    total = await connection.scalar(select(func.count()).select_from(query.order_by(None).subquery()))
    rows = await fetch_all(connection, record, query.limit(limit).offset(offset))
    return Page(rows=tuple(rows), total=total or 0)


def newest_first(time: Column[Any], *ties: Column[Any]) -> list[ColumnElement[Any]]:
    """Return an order in which no two rows are equal. So rows with equal times appear exactly once across pages."""
    return [time.desc(), *(column.desc() for column in ties)]


def insert_into(
    connection: AsyncConnection, table: Table, rows: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> postgresql.Insert:
    """Return the insert statement of the dialect, which has ON CONFLICT.

    The statement classes of both dialects have the same methods.
    """
    insert: Any = _INSERT[connection.dialect.name]
    statement: postgresql.Insert = insert(table).values(rows)
    return statement


async def insert_unless_there(connection: AsyncConnection, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert the row. Returns False if a unique constraint refuses the row.

    If two inserts run at the same time, the second insert waits for the commit of the first insert, and then returns
    False. A later select in the transaction of the second insert finds the row of the first insert.
    """
    statement = _insert_unless_there(connection.dialect.name, table)
    return (await connection.execute(statement, row)).one_or_none() is not None


@cache
def _insert_unless_there(dialect: str, table: Table) -> Executable:
    """Return the insert with RETURNING, because SQLAlchemy guarantees a rowcount only for UPDATE and DELETE."""
    insert: Any = _INSERT[dialect](table)
    statement: Executable = insert.on_conflict_do_nothing().returning(literal(1))
    return statement


async def changes_rows(
    connection: AsyncConnection, statement: Update | Delete, parameters: StatementParameters = None
) -> bool:
    """Run an update or a delete. Returns False if no row changed."""
    return (await connection.execute(statement, parameters)).rowcount > 0
