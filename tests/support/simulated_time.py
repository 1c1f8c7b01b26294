"""An event loop in which an hour passes in no time: with nothing left to do, its clock jumps to the next timer."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

from typing_extensions import override

P = ParamSpec("P")


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that never waits: it moves the clock forward by the timeout."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    @override
    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if timeout is None:
            raise RuntimeError("The test waits for something that no timer and no other task will bring.")
        self.now += timeout
        return []


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` begins at 0."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    @override
    def time(self) -> float:
        return self._jumping.now


def simulated_time(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Run an async test in such a loop of its own."""

    @functools.wraps(test)
    def run(*arguments: P.args, **names: P.kwargs) -> None:
        async def body() -> None:
            await test(*arguments, **names)

        with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
            runner.run(body())

    return run


def now() -> float:
    return asyncio.get_running_loop().time()
