"""SamplerPools: what a decision about one is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tinsmith_operator.act import Actor
from tinsmith_operator.cache import Cache
from tinsmith_operator.decide.actions import Decision
from tinsmith_operator.decide.observed import KubernetesWarning, ObservedPool
from tinsmith_operator.decide.pool.decision import decide_pool
from tinsmith_operator.decide.pool.rollout import read_rollout
from tinsmith_operator.events import Events
from tinsmith_operator.installation import Installation
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.pool import SamplerPool, parse_pool
from tinsmith_operator.observe import observe_pool
from tinsmith_operator.resources import Key
from tinsmith_operator.trust import Trust


@dataclass(frozen=True)
class PoolKind:
    cache: Cache
    actor: Actor
    events: Events
    trust: Trust
    installation: Installation
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def decide(self, key: Key, body: Manifest) -> tuple[SamplerPool, Decision]:
        pool = parse_pool(body)
        children = observe_pool(self.cache, key, pool, self.trust.known_fingerprint)
        observed = replace(
            children,
            warnings=await self._warnings(children),
            refusals=self.actor.refusals(key),
            trust_problem=self.trust.problem,
        )
        return pool, decide_pool(observed, self.installation, self.clock())

    def forget(self, key: Key) -> None:
        """Nothing is kept of a pool."""

    async def _warnings(self, observed: ObservedPool) -> tuple[KubernetesWarning, ...]:
        """Only while they could explain something: a pool at rest costs no request."""
        wanted, deployment = observed.pool.spec.replicas, observed.workload
        at_rest = deployment is None or wanted == 0 or read_rollout(deployment).is_done(wanted)
        return () if at_rest else await self.events.warnings(observed.pool)
