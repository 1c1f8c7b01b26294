"""When sessions may restart for what nobody asked of them: another default image, other settings of the installation.

Off by default. When it is on, a few at a time, and only within a window where there is one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from math import floor

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")

_CLOCK = r"(?:[01]\d|2[0-3]):[0-5]\d"
_BUDGET = re.compile(r"([1-9]\d{0,5})(%?)")
_WINDOW = re.compile(rf"(?:(?P<days>[A-Z][a-z]{{2}}(?:,[A-Z][a-z]{{2}})*) )?(?P<from>{_CLOCK})-(?P<to>{_CLOCK}|24:00)")


@dataclass(frozen=True)
class Window:
    """In UTC. days: on which it opens. One that ends before it begins goes on into the next day."""

    days: frozenset[int]
    opens: int
    closes: int

    def is_open(self, now: datetime) -> bool:
        minute, day = now.hour * 60 + now.minute, now.weekday()
        if self.opens < self.closes:
            return day in self.days and self.opens <= minute < self.closes
        return (day in self.days and minute >= self.opens) or ((day - 1) % 7 in self.days and minute < self.closes)


@dataclass(frozen=True)
class RestartPolicy:
    """automatic: whether anything restarts unasked. budget: how many at the same time, `2` or `10%`; one at least."""

    automatic: bool = False
    budget: str = "1"
    window: Window | None = None

    def most(self, sessions: int) -> int:
        """sessions: that want to run."""
        count, percent = _read_budget(self.budget)
        return max(1, floor(sessions * count / 100)) if percent else count

    def is_open(self, now: datetime) -> bool:
        return self.automatic and (self.window is None or self.window.is_open(now))


def parse_policy(*, automatic: bool, budget: str, window: str) -> RestartPolicy:
    """Raises ValueError."""
    _read_budget(budget)
    return RestartPolicy(automatic, budget, parse_window(window) if window else None)


def _read_budget(budget: str) -> tuple[int, bool]:
    match = _BUDGET.fullmatch(budget)
    if match is None or (match[2] and int(match[1]) > 100):
        raise ValueError(f"{budget!r} is no budget of restarts: write a number from 1 on, or a share such as 10%")
    return int(match[1]), bool(match[2])


def parse_window(text: str) -> Window:
    """`02:00-05:00` each day, `Sat,Sun 22:00-04:00` on some. Raises ValueError."""
    match = _WINDOW.fullmatch(text)
    days = match["days"].split(",") if match is not None and match["days"] else list(DAYS)
    if match is None or not set(days) <= set(DAYS):
        raise ValueError(
            f"{text!r} is no window for restarts: write it in UTC like 02:00-05:00, or Sat,Sun 22:00-04:00"
        )
    opens, closes = _minute(match["from"]), _minute(match["to"])
    if opens == closes:
        raise ValueError(f"the window for restarts {text!r} ends when it begins: leave it empty for any time")
    return Window(frozenset(DAYS.index(day) for day in days), opens, closes)


def _minute(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)
