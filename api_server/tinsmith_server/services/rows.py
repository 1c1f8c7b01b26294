"""Reads of rows in the store: rows that a tenant owns, rows in a cache, and long pages."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tinsmith_server.errors import NotFound
from tinsmith_server.logs import bind_ids
from tinsmith_server.store.records import Model, Page, Session
from tinsmith_server.store.store import Store

K = TypeVar("K")
V = TypeVar("V")


class RowCache(Generic[K, V]):
    """A cache with entries that expire after some seconds.

    A change by another replica is visible when the old entry expires.
    """

    def __init__(self, seconds: float, entries: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._entries = entries
        self._clock = clock
        self._kept: dict[K, tuple[V, float]] = {}

    def get(self, key: K) -> V | None:
        value, until = self._kept.get(key, (None, 0.0))
        return value if self._clock() < until else None

    def put(self, key: K, value: V) -> None:
        if len(self._kept) >= self._entries:
            self._kept.clear()
        self._kept[key] = (value, self._clock() + self._seconds)

    def forget(self, key: K) -> None:
        self._kept.pop(key, None)

    def clear(self) -> None:
        self._kept.clear()


async def owned_session(store: Store, tenant: str, session_id: str) -> Session:
    """Return the session. Raises NotFound for an unknown session, and for another tenant's session."""
    session = await store.get_session(session_id)
    if session is None or session.tenant != tenant:
        raise NotFound(f"there is no session {session_id}")
    bind_ids(session_id=session_id)
    return session


async def owned_model(store: Store, tenant: str, model_id: str) -> Model:
    """Return the model. Raises NotFound for an unknown model, and for another tenant's model."""
    model = await store.get_model(model_id)
    if model is None or model.tenant != tenant:
        raise NotFound(f"there is no model {model_id}")
    bind_ids(session_id=model.session_id, model_id=model_id)
    return model


R = TypeVar("R")

ROWS_AT_ONCE = 100


async def in_steps(read: Callable[[int, int], Awaitable[Page[R]]], limit: int, offset: int) -> Page[R]:
    """Return a page of `limit` rows from `offset`. The page is read in steps, so that other requests run in between.

    `read` takes a limit and an offset. Rows that are created between two steps shift later rows, as they do between two
    pages.
    """
    rows: list[R] = []
    while True:
        page = await read(min(ROWS_AT_ONCE, limit - len(rows)), offset + len(rows))
        rows += page.rows
        if len(rows) >= limit or not page.rows:
            return Page(tuple(rows), page.total)
