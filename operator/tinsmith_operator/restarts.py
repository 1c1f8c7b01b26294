"""Maintenance windows, and the budget of automatic restarts.

Sessions restart automatically after a change of the default image or of the installation's settings. Automatic restarts
are off by default. Automatic restarts happen only within the window, and the budget limits how many sessions restart at
the same time.
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
    """A daily window in UTC.

    - `days`: the weekdays on which the window opens, with Monday as 0.
    - `opens`, `closes`: minutes of the day.

    A window with `closes` before `opens` ends on the next day.
    """

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
    """The policy of automatic restarts.

    - `automatic`: whether automatic restarts are on.
    - `budget`: how many sessions may restart at the same time, for example `2` or `10%`; at least one session may
      always restart.
    """

    automatic: bool = False
    budget: str = "1"
    window: Window | None = None

    def most(self, sessions: int) -> int:
        """Return how many sessions may restart at the same time.

        `sessions` is the number of sessions that should run.
        """
        count, percent = _read_budget(self.budget)
        return max(1, floor(sessions * count / 100)) if percent else count

    def is_open(self, now: datetime) -> bool:
        return self.automatic and (self.window is None or self.window.is_open(now))


def parse_policy(*, automatic: bool, budget: str, window: str) -> RestartPolicy:
    """Read the policy. Raises ValueError."""
    _read_budget(budget)
    return RestartPolicy(automatic, budget, parse_window(window) if window else None)


def _read_budget(budget: str) -> tuple[int, bool]:
    match = _BUDGET.fullmatch(budget)
    if match is None or (match[2] and int(match[1]) > 100):
        raise ValueError(f"{budget!r} is not a budget of restarts: use a number of at least 1, or a share such as 10%")
    return int(match[1]), bool(match[2])


def parse_window(text: str) -> Window:
    """Read a window: `02:00-05:00` on each day, or `Sat,Sun 22:00-04:00`. Raises ValueError."""
    match = _WINDOW.fullmatch(text)
    days = match["days"].split(",") if match is not None and match["days"] else list(DAYS)
    if match is None or not set(days) <= set(DAYS):
        raise ValueError(
            f"{text!r} is not a window for restarts: write it in UTC, such as 02:00-05:00 or Sat,Sun 22:00-04:00"
        )
    opens, closes = _minute(match["from"]), _minute(match["to"])
    if opens == closes:
        raise ValueError(f"the window for restarts {text!r} closes when it opens: leave it empty for any time")
    return Window(frozenset(DAYS.index(day) for day in days), opens, closes)


def _minute(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * 60 + int(minutes)
