"""Notices to sampling clients that samples have ended.

A client with thousands of samples sends one request for all samples.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinsmith_rpc import SAMPLES_OF_A_CLIENT

MOST_REPORTED = 1000
"""The largest number of samples in one answer."""

MOST_LOST = 10_000
"""The number of lost samples that are remembered until the clients are informed."""

ROUNDS_KEPT = 10_000
"""The number of clients for which the last round is remembered.

For all other clients, the round is the number in the request; servers take this number from their clocks.
"""

REPEAT_SECONDS = 60.0
"""The time after which a notice is repeated if the result was not fetched."""

_REQUEST_ID = re.compile(r"(.+):asample:([0-9]{1,19})(?:@[0-9a-f]+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SampleClient:
    """A client of a sampling session. The first client has the number 0."""

    sampling_session_id: str
    number: int


def client_of(request_id: str) -> SampleClient | None:
    """Return the client of a request, or None if the request's ID does not have the form of a server's IDs."""
    found = _REQUEST_ID.fullmatch(request_id)
    return SampleClient(found[1], int(found[2]) // SAMPLES_OF_A_CLIENT) if found else None


@dataclass(slots=True)
class _Notice:
    """The round in which a notice was sent, or 0 if the notice was not sent yet."""

    round: int = 0
    at: float = 0.0


class EndedSamples:
    """The ended samples of all clients. Used on one event loop only.

    A notice is sent in a round. A notice is repeated until the client has seen the notice's round or has fetched the
    result. The rounds of a client only increase, even if several servers ask for the client. If a later answer arrives
    before an earlier answer, the client has not seen the round of the earlier answer. Rounds are counted per client,
    because each client has a separate cursor.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[SampleClient, dict[str, _Notice]] = {}
        self._waiting: dict[SampleClient, set[asyncio.Event]] = {}
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._last_round: OrderedDict[SampleClient, int] = OrderedDict()

    def note(self, request_id: str) -> None:
        """Note that the sample has a result."""
        client = client_of(request_id)
        if client is None:
            return
        self._ended.setdefault(client, {})[request_id] = _Notice()
        for waiter in self._waiting.get(client, ()):
            waiter.set()

    def note_lost(self, request_id: str) -> None:
        """Note that the sample will never have a result."""
        self._lost[request_id] = None
        if len(self._lost) > MOST_LOST:
            self.forget(next(iter(self._lost)))
        self.note(request_id)

    def forget(self, request_id: str) -> None:
        """Note that the result was fetched, or that the result is no longer kept."""
        self._lost.pop(request_id, None)
        client = client_of(request_id)
        if client is not None and client in self._ended:
            self._ended[client].pop(request_id, None)
            if not self._ended[client]:
                del self._ended[client]

    async def any(self, client: SampleClient, seen: int, timeout_seconds: float) -> bool:
        """Wait until the client has a notice to receive. Return whether a notice came before the timeout."""
        if self._unreported(client, seen):
            return True
        ended = asyncio.Event()
        waiting = self._waiting.setdefault(client, set())
        waiting.add(ended)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await ended.wait()
        except TimeoutError:
            return False
        finally:
            waiting.discard(ended)
            if not waiting:
                self._waiting.pop(client, None)

    def report(self, client: SampleClient, seen: int, round: int) -> tuple[Sequence[str], int]:
        """Report the ended samples in this round. Return the ended samples and the number of the round."""
        round = self._next_round(client, round)
        for request_id in self._seen_and_lost(client, seen):
            self.forget(request_id)
        unreported = self._unreported(client, seen)[:MOST_REPORTED]
        now = self._clock()
        for request_id in unreported:
            self._ended[client][request_id] = _Notice(round, now)
        return unreported, round

    def _next_round(self, client: SampleClient, requested: int) -> int:
        round = max(requested, self._last_round.pop(client, 0) + 1)
        self._last_round[client] = round
        if len(self._last_round) > ROUNDS_KEPT:
            self._last_round.popitem(last=False)
        return round

    def _unreported(self, client: SampleClient, seen: int) -> list[str]:
        long_ago = self._clock() - REPEAT_SECONDS
        ended = self._ended.get(client, {})
        return [one for one, notice in ended.items() if not 0 < notice.round <= seen or notice.at < long_ago]

    def _seen_and_lost(self, client: SampleClient, seen: int) -> list[str]:
        ended = self._ended.get(client, {})
        return [one for one, notice in ended.items() if 0 < notice.round <= seen and one in self._lost]
