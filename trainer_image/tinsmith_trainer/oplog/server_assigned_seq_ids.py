"""Numbers that the journal gives to operations that come without one, as clients of plain HTTP send them.

One place decides, under the lock under which operations are accepted: there is no gap between giving a number and
accepting what has it, however many servers ask. The key of the client makes a repeated submission known. The operations
of a model are numbered by its client or here, never by both: each would take the next number of the other for a repeat.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith_rpc import RELEASE_SEQ_ID

from tinsmith_trainer.oplog.journal_tables import Database, StoredModel

REMEMBERED_KEYS = 4096
"""Of a model's newest operations. Their rows are kept for longer, so a start finds them again."""


class NumbersMixed(ValueError):
    """The message is for the client."""


@dataclass(slots=True)
class AssignedSeqIds:
    """One model's: the last number that was given, 0 for a model that its client numbers, and the newest keys."""

    last: int = 0
    _of_keys: dict[str, int] = field(default_factory=dict)  # the oldest first
    _refused: frozenset[int] = frozenset()

    def find(self, key: str) -> int | None:
        """The number of the operation that came with this key."""
        return self._of_keys.get(key)

    def give(self, key: str) -> int:
        """The next one."""
        self.last += 1
        self.remember(key, self.last)
        return self.last

    def remember(self, key: str, number: int) -> None:
        self._of_keys[key] = number
        if len(self._of_keys) > REMEMBERED_KEYS:
            del self._of_keys[next(iter(self._of_keys))]

    def take_back(self, key: str, number: int) -> None:
        """Take back a number that was not accepted. Below an accepted one it stays out, as one that never came."""
        if self._of_keys.pop(key, None) is None:
            return
        self._refused |= {number}
        while self.last in self._refused:
            self._refused -= {self.last}
            self.last -= 1


def is_from_a_client(number: int) -> bool:
    """Neither a model's creation nor its end, which have numbers of their own."""
    return 0 < number < RELEASE_SEQ_ID


def needs_a_seq_id(model_id: str) -> NumbersMixed:
    return NumbersMixed(
        f"the operations of {model_id} came with a seq_id until now, so this one needs one, too: send the next number, "
        "or make another model"
    )


def needs_no_seq_id(model_id: str) -> NumbersMixed:
    return NumbersMixed(
        f"the operations of {model_id} came without a seq_id until now, and the server numbers them: leave seq_id out, "
        "or make another model"
    )


# ---- in the journal's thread


def note_assigned(db: Database, model_id: str, number: int) -> None:
    db.execute(
        "UPDATE models SET last_given_number = max(coalesce(last_given_number, 0), ?) WHERE model_id = ?",
        (number, model_id),
    )


def read_assigned(db: Database, model: StoredModel) -> AssignedSeqIds:
    """As they were when the process before this one ended."""
    row = db.execute("SELECT last_given_number FROM models WHERE model_id = ?", (model.model_id,)).fetchone()
    given = AssignedSeqIds(int(row[0]) if row is not None and row[0] is not None else 0)
    if not given.last:
        return given
    newest = db.execute(
        "SELECT idempotency_key, seq_id FROM operations WHERE model_id = ? AND idempotency_key IS NOT NULL"
        " ORDER BY seq_id DESC LIMIT ?",
        (model.model_id, REMEMBERED_KEYS),
    )
    for key, number in reversed(newest.fetchall()):
        given.remember(str(key), int(number))
    return given
