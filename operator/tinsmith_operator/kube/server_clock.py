"""The offset of the API server's clock, by the `Date` of its answers, and the time to certify by.

A certificate that begins in the future is accepted by no one, and nothing in a refused handshake names the clock. Which
of two clocks is wrong cannot be known here, so certificates begin by the earlier one: then both accept them.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from tinsmith_operator.logs import get_logger

TOLERATED = timedelta(seconds=60)
"""Below the five minutes by which certificates are backdated."""
DATE_STEP = timedelta(seconds=1)
"""The header has whole seconds."""

log = get_logger(__name__)


def least_offset(date: datetime, sent: datetime, received: datetime, known: timedelta = timedelta()) -> timedelta:
    """Return by how much the other clock is ahead at least, or behind where negative: its answer was written at some
    moment between these two. An answer that takes long proves less, and leaves what is known where it agrees with it.
    """
    earliest, latest = date - received, date + DATE_STEP - sent
    return min(max(known, earliest), latest)


class ServerClock:
    """local: this machine's clock."""

    def __init__(self, local: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.local = local
        self._offset = timedelta()

    @property
    def offset_seconds(self) -> float:
        """The lead of the API server's clock, as far as it is proved; zero before the first answer."""
        return self._offset.total_seconds()

    @property
    def problem(self) -> str | None:
        """A sentence while the clocks differ by more than certificates allow for."""
        if abs(self._offset) <= TOLERATED:
            return None
        seconds, way = round(abs(self._offset).total_seconds()), "behind" if self._offset > timedelta() else "ahead of"
        return (
            f"The operator's clock is {seconds} s {way} the API server's, so certificates begin by the earlier of the "
            "two. Set the clocks of the operator's node and of the control plane by NTP."
        )

    def now(self) -> datetime:
        """The local time, or the API server's where that is earlier by more than is tolerated."""
        return self.local() + min(self._offset, timedelta()) if self.problem is not None else self.local()

    def note(self, date: str | None, sent: datetime) -> None:
        """Take the `Date` of an answer to a request that was sent at this local time."""
        try:
            told = parsedate_to_datetime(date or "").astimezone(UTC)
        except ValueError:
            return  # a proxy need not send one
        before = self.problem
        self._offset = least_offset(told, sent, self.local(), self._offset)
        if (before is None) != (self.problem is None):
            log.warning("clocks differ" if before is None else "clocks agree again", problem=self.problem)
