"""What runs beside requests goes on, whatever goes wrong in it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tinsmith_server.fleet.base import Changes
from tinsmith_server.services.background.tasks import Background


class Fleet:
    """Has one worker that runs. The first who asks for it finds a mistake of ours."""

    def __init__(self) -> None:
        self.changes = Changes()
        self.mistakes = [RuntimeError("nobody has thought of this")]

    @property
    def workers(self) -> Sequence[Any]:
        if self.mistakes:
            raise self.mistakes.pop()
        return [SimpleNamespace(worker_id="w1", running=lambda: True)]


class Events:
    """Those of a worker, followed until the test ends."""

    def __init__(self) -> None:
        self.followed = asyncio.Event()

    async def follow(self, _worker_id: str, _seconds: float) -> None:
        self.followed.set()
        await asyncio.Event().wait()


class Store:
    """Without any model."""

    async def models_of_worker(self, _worker_id: str, _states: Sequence[str]) -> Sequence[Any]:
        return []


class Leases:
    """Of a replica that does everything."""

    def want(self, _chore: str) -> None: ...
    def unwant(self, _chore: str) -> None: ...
    async def until_held(self, _chore: str) -> None: ...


async def test_workers_are_followed_though_looking_for_them_has_failed() -> None:
    events = Events()
    others = dict.fromkeys(("sessions", "binding", "reaper", "lost_workers", "retention", "inspection"))
    background = Background(store=Store(), fleet=Fleet(), leases=Leases(), events=events, **others)  # type: ignore[arg-type]
    following = asyncio.create_task(background._follow_workers())
    await asyncio.wait_for(events.followed.wait(), 20)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
