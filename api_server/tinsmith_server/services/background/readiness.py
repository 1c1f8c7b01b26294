"""Whether requests should be sent to this replica."""

from __future__ import annotations

import asyncio

from tinsmith_server.errors import TinsmithError
from tinsmith_server.fleet.base import Fleet
from tinsmith_server.logs import get_logger
from tinsmith_server.store.base import Store

log = get_logger(__name__)

STORE_SECONDS = 2.0


class Readiness:
    """The store must answer; and the fleet must know where its workers are, while another replica's does.

    Whether workers run is no matter. With nobody else to go to, requests come here all the same: most need only
    the connections that are there already, and clients that find no server at all give up.
    """

    def __init__(self, store: Store, fleet: Fleet, replica: str) -> None:
        """`replica` is what this one attends as."""
        self._store = store
        self._fleet = fleet
        self._replica = replica
        # What the log has said already: this is asked every few seconds.
        self._told: str | None = None

    async def problem(self) -> str | None:
        """None when the replica is ready."""
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._store.check()
                return await self._fleet_problem()
        except TimeoutError:
            return f"the store has not answered for {STORE_SECONDS:g} s"
        except TinsmithError as error:
            return str(error)

    async def _fleet_problem(self) -> str | None:
        problem = self._fleet.problem
        if problem is None or set(await self._store.attending()) - {self._replica}:
            self._told = None
            return problem
        if self._told != problem:
            log.warning("ready all the same, as no other replica is", reason=problem)
        self._told = problem
        return None
