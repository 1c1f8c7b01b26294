"""Sequence numbers that the journal assigns to operations of clients that send none, for example by plain HTTP.

The lock for accepting operations also guards the assignment. So the assignment of a number and the acceptance of the
operation are one step, even with several servers. The client's key identifies a repeated submission. Either the client
numbers a model's operations, or the journal does. If both assigned numbers, a new number from the client could look
like a repeated number from the journal.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith_rpc import RELEASE_SEQ_ID

from tinsmith_trainer.oplog.journal_tables import Database, StoredModel

REMEMBERED_KEYS = 4096
"""The number of newest keys that a model remembers.

Rows of operations are kept for longer, so that a start finds these keys again.
"""


class NumbersMixed(ValueError):
    """An error for a model that gets operations with and without numbers. Clients see the message of this error."""


@dataclass(slots=True)
class AssignedSeqIds:
    """The assigned numbers of a model: the last number and the newest keys.

    The last number is 0 if the client numbers the operations.
    """

    last: int = 0
    _of_keys: dict[str, int] = field(default_factory=dict)  # the oldest key is first
    _refused: frozenset[int] = frozenset()

    def find(self, key: str) -> int | None:
        """Return the number of the operation with this key."""
        return self._of_keys.get(key)

    def assign(self, key: str) -> int:
        """Assign the next number."""
        self.last += 1
        self.remember(key, self.last)
        return self.last

    def remember(self, key: str, number: int) -> None:
        self._of_keys[key] = number
        if len(self._of_keys) > REMEMBERED_KEYS:
            del self._of_keys[next(iter(self._of_keys))]

    def take_back(self, key: str, number: int) -> None:
        """Take back the number of an operation that was not accepted.

        The number stays unused if a higher number was accepted.
        """
        if self._of_keys.pop(key, None) is None:
            return
        self._refused |= {number}
        while self.last in self._refused:
            self._refused -= {self.last}
            self.last -= 1


def is_from_a_client(number: int) -> bool:
    """Return whether the number belongs to neither the creation nor the end of a model."""
    return 0 < number < RELEASE_SEQ_ID


def needs_a_seq_id(model_id: str) -> NumbersMixed:
    return NumbersMixed(
        f"the operations of {model_id} have a seq_id, so this one needs one, too: send the next number, "
        "or create another model"
    )


def needs_no_seq_id(model_id: str) -> NumbersMixed:
    return NumbersMixed(
        f"the operations of {model_id} have no seq_id, since the server numbers them: omit seq_id, "
        "or create another model"
    )


# ---- in the journal's thread


def note_assigned(db: Database, model_id: str, number: int) -> None:
    db.execute(
        "UPDATE models SET last_given_number = max(coalesce(last_given_number, 0), ?) WHERE model_id = ?",
        (number, model_id),
    )


def read_assigned(db: Database, model: StoredModel) -> AssignedSeqIds:
    """Read the numbers that earlier processes assigned."""
    row = db.execute("SELECT last_given_number FROM models WHERE model_id = ?", (model.model_id,)).fetchone()
    assigned = AssignedSeqIds(int(row[0]) if row is not None and row[0] is not None else 0)
    if not assigned.last:
        return assigned
    newest = db.execute(
        "SELECT idempotency_key, seq_id FROM operations WHERE model_id = ? AND idempotency_key IS NOT NULL"
        " ORDER BY seq_id DESC LIMIT ?",
        (model.model_id, REMEMBERED_KEYS),
    )
    for key, number in reversed(newest.fetchall()):
        assigned.remember(str(key), int(number))
    return assigned
