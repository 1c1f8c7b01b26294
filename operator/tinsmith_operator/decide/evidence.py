"""What tells of a pod beside the pod itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from tinsmith_operator.decide.observed import KubernetesWarning

WARNING_LIFE = timedelta(minutes=20)
"""A StatefulSet's controller tries again within 17 minutes; what is older has been overcome."""


@dataclass(frozen=True)
class Evidence:
    """warnings: of the namespace. claim_uid: of the claim with its journal, if it has one."""

    warnings: tuple[KubernetesWarning, ...]
    now: datetime
    claim_uid: str | None = None

    def latest(self, uid: str, reasons: frozenset[str]) -> KubernetesWarning | None:
        """About the object of that UID, and not too old to matter."""
        recent = (
            warning
            for warning in self.warnings
            if warning.uid == uid and warning.reason in reasons and self.now - warning.at < WARNING_LIFE
        )
        return max(recent, key=lambda warning: warning.at, default=None)
