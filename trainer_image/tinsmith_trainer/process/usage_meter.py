"""Counters of used tokens by user and hour, which are kept until the server collects them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tinsmith_rpc import worker_pb2

Kind: TypeAlias = worker_pb2.UsageKind.ValueType

HOUR_SECONDS = 3600
MOST_ROWS = 10_000
"""The limit on rows that the server has not collected yet. A server collects the rows every few seconds.

If no server collects the rows, further users share one row.
"""


@dataclass(frozen=True, slots=True)
class UsageRow:
    """A user, an hour and a kind of usage.

    `used_by` is a model or a sampling session. `hour` is the start of the hour in Unix seconds.
    """

    used_by: str
    tenant: str
    hour: int
    kind: Kind


class UsageMeter:
    """Counters in memory. Thread-safe. A killed process loses the counts that were not collected."""

    def __init__(self, most_rows: int = MOST_ROWS, clock: Callable[[], float] = time.time) -> None:
        self._most_rows = most_rows
        self._clock = clock
        self._guard = threading.Lock()
        self._amounts: dict[UsageRow, int] = {}

    def add(self, used_by: str, tenant: str, kind: Kind, amount: int) -> None:
        """Add to the current hour. An amount of 0 creates no row."""
        if amount:
            self.add_row(UsageRow(used_by, tenant, int(self._clock()) // HOUR_SECONDS * HOUR_SECONDS, kind), amount)

    def add_row(self, row: UsageRow, amount: int) -> None:
        with self._guard:
            if row not in self._amounts and len(self._amounts) >= self._most_rows:
                row = UsageRow("", row.tenant, row.hour, row.kind)
            self._amounts[row] = self._amounts.get(row, 0) + amount

    def take(self) -> worker_pb2.TakeUsageReply:
        """Return and remove the counts since the previous call."""
        with self._guard:
            taken, self._amounts = self._amounts, {}
        return worker_pb2.TakeUsageReply(
            usage=[
                worker_pb2.Usage(used_by=row.used_by, tenant=row.tenant, hour=row.hour, kind=row.kind, amount=amount)
                for row, amount in taken.items()
            ]
        )

    def give_back(self, usage: worker_pb2.TakeUsageReply) -> None:
        """Add counts again that were taken but could not be stored."""
        for one in usage.usage:
            self.add_row(UsageRow(one.used_by, one.tenant, one.hour, one.kind), one.amount)
