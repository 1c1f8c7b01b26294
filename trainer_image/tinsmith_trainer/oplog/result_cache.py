"""Results of operations that are in the journal, and are asked for in a moment."""

from __future__ import annotations

from collections import OrderedDict

from tinsmith_trainer.oplog.journal_tables import OperationResult

CACHED_RESULT_BYTES = 64 * 1024**2
RESULT_ENTRY_BYTES = 512
"""What a cached result takes beside its payload and its message: its key, its objects, and its place."""


class ResultCache:
    """The latest results, so that a poll right after the finish need not read the journal.

    The very latest is kept however large it is: a client that asks for it again and again would have the journal's
    thread read it each time, and everybody's submissions wait for that.
    """

    def __init__(self, capacity_bytes: int = CACHED_RESULT_BYTES) -> None:
        self._capacity_bytes = capacity_bytes
        self._bytes = 0
        self._results: OrderedDict[tuple[str, int], OperationResult] = OrderedDict()

    def get(self, key: tuple[str, int]) -> OperationResult | None:
        return self._results.get(key)

    def put(self, key: tuple[str, int], result: OperationResult) -> None:
        replaced = self._results.pop(key, None)
        if replaced is not None:
            self._bytes -= _cached_bytes(replaced)
        self._results[key] = result
        self._bytes += _cached_bytes(result)
        while self._bytes > self._capacity_bytes and len(self._results) > 1:
            _, oldest = self._results.popitem(last=False)
            self._bytes -= _cached_bytes(oldest)


def _cached_bytes(result: OperationResult) -> int:
    """Never 0: a failure has no payload, and a client may make failures without end."""
    message = result.failure.message if result.failure else ""
    return RESULT_ENTRY_BYTES + len(result.payload or b"") + len(message)
