"""The offset of the API server's clock, and the time for certificates.

The header `Date` of the API server's answers shows the offset.

A certificate whose validity begins in the future is refused, and the failed handshake does not mention the clock. The
operator cannot know which clock is wrong. So the validity of certificates begins at the earlier of the two clocks'
times.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

from tinsmith_operator.logs import get_logger

TOLERATED = timedelta(seconds=60)
"""The largest offset that is tolerated.

The offset is shorter than the five minutes by which certificates are backdated.
"""
DATE_STEP = timedelta(seconds=1)
"""The resolution of the header `Date`."""

log = get_logger(__name__)


def least_offset(date: datetime, sent: datetime, received: datetime, known: timedelta = timedelta()) -> timedelta:
    """Return the offset that agrees with the answer and is closest to the known offset of the other clock.

    A negative offset means that the other clock is behind.

    The server wrote the answer between `sent` and `received`, so a slow answer proves less. If the answer agrees with
    the known offset, return the known offset.
    """
    earliest, latest = date - received, date + DATE_STEP - sent
    return min(max(known, earliest), latest)


class ServerClock:
    """The API server's clock, compared with a local clock."""

    def __init__(self, local: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.local = local
        self._offset = timedelta()

    @property
    def offset_seconds(self) -> float:
        """The proven offset of the API server's clock in seconds; positive if the API server's clock is ahead.

        The offset is zero before the first answer.
        """
        return self._offset.total_seconds()

    @property
    def problem(self) -> str | None:
        """A sentence about the clocks if the offset is larger than certificates tolerate, otherwise None."""
        if abs(self._offset) <= TOLERATED:
            return None
        seconds, way = round(abs(self._offset).total_seconds()), "behind" if self._offset > timedelta() else "ahead of"
        return (
            f"The operator's clock is {seconds} s {way} the API server's, so certificates begin at the earlier "
            "time. Synchronise the clocks of the operator's node and of the control plane by NTP."
        )

    def now(self) -> datetime:
        """Return the local time.

        If the API server's clock is behind by more than the tolerated offset, return the server's time.
        """
        return self.local() + min(self._offset, timedelta()) if self.problem is not None else self.local()

    def note(self, date: str | None, sent: datetime) -> None:
        """Update the offset from the header `Date` of an answer. `sent` is the local time of the request."""
        try:
            server_time = parsedate_to_datetime(date or "").astimezone(UTC)
        except ValueError:
            return  # a proxy may remove the header
        before = self.problem
        self._offset = least_offset(server_time, sent, self.local(), self._offset)
        if (before is None) != (self.problem is None):
            log.warning("clocks differ" if before is None else "clocks agree again", problem=self.problem)
