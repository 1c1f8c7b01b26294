"""An event loop on a thread of its own, and the ways into it from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class LoopThread:
    """Runs from its construction until `stop`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """From another thread: waits for its result, or raises what it raises."""
        return self.begin(coroutine).result()

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """From any thread, before `stop`, which cancels what still runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, function: Callable[[*Arguments], None], *arguments: *Arguments) -> bool:
        """From any thread, in the order of the calls. False, and nothing happens, after `stop`."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # closed
            return False
        return True

    def stop(self) -> None:
        """What still runs is cancelled. From another thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
