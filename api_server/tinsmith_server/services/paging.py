"""Long pages, read in short steps: what a row holds is made into objects while everybody else waits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from tinsmith_server.store.records import Page

R = TypeVar("R")

ROWS_AT_ONCE = 100


async def in_steps(read: Callable[[int, int], Awaitable[Page[R]]], limit: int, offset: int) -> Page[R]:
    """The page from `offset` with `limit` rows at most; `read` takes the same two. Rows that are made meanwhile shift
    what follows, as they do between two pages."""
    rows: list[R] = []
    while True:
        page = await read(min(ROWS_AT_ONCE, limit - len(rows)), offset + len(rows))
        rows += page.rows
        if len(rows) >= limit or not page.rows:
            return Page(tuple(rows), page.total)
