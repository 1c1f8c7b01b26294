"""How much of the server itself requests may take: memory for bodies, turns to have them read, places in its event
loop, and rates.
"""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_server.services.accounts.body_budget import BodyBudget
from tinsmith_server.services.accounts.concurrency import RequestSlots
from tinsmith_server.services.accounts.fair_lock import FairLock
from tinsmith_server.services.accounts.rates import Rates
from tinsmith_server.settings import Settings

# It comes without a key, so from anybody.
TELEMETRY_BYTES = 16 * 2**20
TELEMETRY_WAIT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Admission:
    """`body_lock` is for reading large bodies; `results` are those that are on their way to clients."""

    bodies: BodyBudget
    results: BodyBudget
    telemetry: BodyBudget
    body_lock: FairLock
    rates: Rates
    slots: RequestSlots

    @classmethod
    def of(cls, settings: Settings) -> Admission:
        return cls(
            bodies=BodyBudget(settings.body_bytes_per_tenant, settings.body_bytes_in_all),
            results=BodyBudget(settings.body_bytes_per_tenant, settings.body_bytes_in_all),
            telemetry=BodyBudget(TELEMETRY_BYTES, TELEMETRY_BYTES, TELEMETRY_WAIT_SECONDS),
            body_lock=FairLock(),
            rates=Rates(
                settings.requests_per_minute or None,
                settings.trained_tokens_per_minute or None,
                settings.sampled_tokens_per_minute or None,
            ),
            slots=RequestSlots(),
        )
