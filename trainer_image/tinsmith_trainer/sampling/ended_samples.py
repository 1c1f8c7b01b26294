"""Which samples have ended, by the sampling client that waits for them: one that has thousands in flight asks once."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinsmith_rpc import SAMPLES_OF_A_CLIENT

MOST_TOLD = 1000
"""In one answer."""

MOST_LOST = 10_000
"""Lost samples that are remembered until their clients have heard of it."""

ROUNDS_KEPT = 10_000
"""Clients whose last round is remembered. Of others the round that is asked for is new, by the clock of who asks."""

TOLD_AGAIN_SECONDS = 60.0
"""What was told and not fetched for so long may never have arrived."""

_REQUEST_ID = re.compile(r"(.+):asample:([0-9]{1,19})(?:@[0-9a-f]+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SampleClient:
    """One of those that share a sampling session; the first one has the number 0."""

    sampling_session_id: str
    number: int


def client_of(request_id: str) -> SampleClient | None:
    """None for an id of another form than the server's."""
    found = _REQUEST_ID.fullmatch(request_id)
    return SampleClient(found[1], int(found[2]) // SAMPLES_OF_A_CLIENT) if found else None


@dataclass(slots=True)
class _Told:
    """Round 0: not yet."""

    round: int = 0
    at: float = 0.0


class EndedSamples:
    """Each is told in a round, and again until its client has seen that round, or fetched the result.

    One event loop's. A client's rounds only grow, whoever asks for it: what is told in an answer that was overtaken by
    another is in a round that the client has not seen. Each has its own: a cursor is what its client says it is.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: dict[SampleClient, dict[str, _Told]] = {}
        self._waiting: dict[SampleClient, set[asyncio.Event]] = {}
        self._lost: OrderedDict[str, None] = OrderedDict()
        self._last_round: OrderedDict[SampleClient, int] = OrderedDict()

    def note(self, request_id: str) -> None:
        """It has a result."""
        client = client_of(request_id)
        if client is None:
            return
        self._ended.setdefault(client, {})[request_id] = _Told()
        for waiter in self._waiting.get(client, ()):
            waiter.set()

    def note_lost(self, request_id: str) -> None:
        """It will never have one."""
        self._lost[request_id] = None
        if len(self._lost) > MOST_LOST:
            self.forget(next(iter(self._lost)))
        self.note(request_id)

    def forget(self, request_id: str) -> None:
        """Its result was fetched, or is no longer kept."""
        self._lost.pop(request_id, None)
        client = client_of(request_id)
        if client is not None and client in self._ended:
            self._ended[client].pop(request_id, None)
            if not self._ended[client]:
                del self._ended[client]

    async def any(self, client: SampleClient, seen: int, timeout_seconds: float) -> bool:
        """Whether there is something to tell, as soon as there is."""
        if self._untold(client, seen):
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

    def tell(self, client: SampleClient, seen: int, round: int) -> tuple[Sequence[str], int]:
        """Those that end in this round, and the round that it has become."""
        round = self._next_round(client, round)
        for request_id in self._seen_and_lost(client, seen):
            self.forget(request_id)
        untold = self._untold(client, seen)[:MOST_TOLD]
        now = self._clock()
        for request_id in untold:
            self._ended[client][request_id] = _Told(round, now)
        return untold, round

    def _next_round(self, client: SampleClient, asked: int) -> int:
        round = max(asked, self._last_round.pop(client, 0) + 1)
        self._last_round[client] = round
        if len(self._last_round) > ROUNDS_KEPT:
            self._last_round.popitem(last=False)
        return round

    def _untold(self, client: SampleClient, seen: int) -> list[str]:
        long_ago = self._clock() - TOLD_AGAIN_SECONDS
        ended = self._ended.get(client, {})
        return [one for one, told in ended.items() if not 0 < told.round <= seen or told.at < long_ago]

    def _seen_and_lost(self, client: SampleClient, seen: int) -> list[str]:
        ended = self._ended.get(client, {})
        return [one for one, told in ended.items() if 0 < told.round <= seen and one in self._lost]
