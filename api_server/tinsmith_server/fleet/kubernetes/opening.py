"""Several beginnings at once, of which one that fails ends the others."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def together(beginnings: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results. Raises the first failure, once the others have ended: `gather` would leave them running."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(beginning) for beginning in beginnings]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
