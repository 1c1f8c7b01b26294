"""Whether a server that runs still answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

PERIOD_SECONDS = 10.0
ILL_SECONDS = 60.0
"""As long as a liveness probe of ours would bear."""


async def until_ill(
    is_healthy: Callable[[], Awaitable[bool]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Returns when it has not been healthy for `ILL_SECONDS`, which questions without an answer count into."""
    well = clock()
    while clock() - well < ILL_SECONDS:
        await sleep(PERIOD_SECONDS)
        if await is_healthy():
            well = clock()
