"""Plain calls: operations that a client sends without a number, for example by plain HTTP.

The lock for accepting operations also guards the positions of plain calls. So the choice of a position and the
acceptance of the operation are one step, even with several servers. The client's key identifies a repeated submission.
"""

from __future__ import annotations

from collections.abc import Iterable

from tinsmith_trainer.oplog.journal_tables import Database, StoredModel
from tinsmith_trainer.oplog.positions import PlainPositions

REMEMBERED_KEYS = 4096
"""The number of newest keys that a model remembers.

Rows of operations are kept for longer, so that a start finds these keys again.
"""


class PlainCalls:
    """The plain calls of a model: their positions and the newest keys."""

    def __init__(self, positions: PlainPositions | None = None) -> None:
        self.positions = positions or PlainPositions()
        self._of_keys: dict[str, int] = {}  # the oldest key is first
        # Positions that no commit has recorded yet, in ascending order.
        self._unrecorded: list[int] = []

    @property
    def keys(self) -> int:
        """The number of remembered keys."""
        return len(self._of_keys)

    def find(self, key: str) -> int | None:
        """Return the position of the operation with this key."""
        return self._of_keys.get(key)

    def place(self, key: str, position: int) -> None:
        """Give the operation with this key a position above all others."""
        self.positions.add(position)
        self._unrecorded.append(position)
        self.remember(key, position)

    def remember(self, key: str, position: int) -> None:
        self._of_keys[key] = position
        if len(self._of_keys) > REMEMBERED_KEYS:
            del self._of_keys[next(iter(self._of_keys))]

    def forget_keys(self) -> None:
        self._of_keys.clear()

    def to_record_with(self, position: int) -> list[int]:
        """Return the positions that the operation at `position` must record when it is accepted.

        Its number depends on all plain calls below it, and one of these may still be refused by a full disk.
        """
        return [plain for plain in self._unrecorded if plain <= position]

    def note_recorded(self, positions: Iterable[int]) -> None:
        recorded = set(positions)
        self._unrecorded = [plain for plain in self._unrecorded if plain not in recorded]

    def take_back(self, key: str, position: int, *, is_highest: bool) -> None:
        """Take back the position of an operation that was not accepted.

        The position stays unused if a higher one was given: the numbers of the operations there count it.
        """
        self._of_keys.pop(key, None)
        if is_highest and self.positions.last == position:
            self.positions.remove_last()
            self._unrecorded.remove(position)


# ---- in the journal's thread


def record_positions(db: Database, model_id: str, positions: Iterable[int]) -> None:
    """Record the positions of plain calls. The positions are in ascending order, and may be recorded already."""
    for position in positions:
        db.execute("UPDATE plain_calls SET last = ?2 WHERE model_id = ?1 AND last = ?2 - 1", (model_id, position))
        db.execute(
            "INSERT INTO plain_calls SELECT ?1, ?2, ?2"
            " WHERE NOT EXISTS (SELECT 1 FROM plain_calls WHERE model_id = ?1 AND first <= ?2 AND last >= ?2)",
            (model_id, position),
        )


def read_plain_calls(db: Database, model: StoredModel) -> PlainCalls:
    """Read the plain calls that earlier processes accepted."""
    ranges = db.execute("SELECT first, last FROM plain_calls WHERE model_id = ? ORDER BY first", (model.model_id,))
    calls = PlainCalls(PlainPositions((int(first), int(last)) for first, last in ranges))
    if calls.positions:
        newest = db.execute(
            "SELECT idempotency_key, seq_id FROM operations WHERE model_id = ? AND idempotency_key IS NOT NULL"
            " ORDER BY seq_id DESC LIMIT ?",
            (model.model_id, REMEMBERED_KEYS),
        )
        for key, position in reversed(newest.fetchall()):
            calls.remember(str(key), int(position))
    return calls
