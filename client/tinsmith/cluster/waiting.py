"""Looking again until something has happened, and telling on the way what is the matter."""

from __future__ import annotations

import time
from collections.abc import Callable

from tinsmith.cluster.errors import DidNotHappen, Unreachable
from tinsmith.cluster.families import Family
from tinsmith.cluster.health import judge
from tinsmith.cluster.manifests import span
from tinsmith.cluster.requests import Outcome

LOOK_SECONDS = 2.0


def wait_for(
    look: Callable[[], Family],
    outcome: Outcome,
    *,
    name: str,
    timeout_seconds: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """The outcome's sentence. name: as the next command takes it.

    Each new reason on the way is told once. A cluster that is away for a while is waited for like everything else.
    Raises DidNotHappen when time is over, or when the outcome says that it cannot come any more.
    """
    ends_at = clock() + timeout_seconds
    told = None
    while True:
        try:
            family = look()
        except Unreachable as error:
            news = str(error)
        else:
            if (sentence := outcome(family)) is not None:
                return sentence
            verdict = judge(family)
            news = f"{verdict.reason}: {verdict.message}"
        if news != told:
            tell(news)
            told = news
        if clock() >= ends_at:
            raise DidNotHappen(
                f"It has not happened within {span(timeout_seconds)}. Last seen: {news} The request stands; "
                f"`kubectl tinsmith why {name}` says more."
            )
        sleep(LOOK_SECONDS)
