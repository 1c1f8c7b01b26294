"""Names that the operator writes into the cluster; a test compares them with the operator's own."""

from __future__ import annotations

from enum import Enum

GROUP = "tinsmith.dev"

MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
OPERATOR = "tinsmith-operator"

MEMBER_APPLICATION = "tinsmith-worker-member"
"""As `app.kubernetes.io/name` of the pods of a session of several, but for the one with its worker."""

CONVERSION_APPLICATION = "tinsmith-conversion"
"""As `app.kubernetes.io/name` of the pods of the Job that converts a session's model before it has others."""

INSTALLATION_SELECTOR = "app.kubernetes.io/name=tinsmith"
"""What the chart installs: the operator, the API server, and what belongs to them."""

SNAPSHOT_REQUEST = f"{GROUP}/snapshot-requested-at"
RESTART_REQUEST = f"{GROUP}/restart-requested-at"


class Kind(Enum):
    """The two resources. `word` is how a person tells them apart: `session/NAME`, `pool/NAME`."""

    SESSION = ("TrainingSession", "trainingsessions", "session", frozenset({"StatefulSet", "RayCluster"}))
    POOL = ("SamplerPool", "samplerpools", "pool", frozenset({"Deployment"}))

    def __init__(self, kind: str, plural: str, word: str, workloads: frozenset[str]) -> None:
        self.kind = kind
        self.resource = f"{plural}.{GROUP}"
        self.word = word
        self.workloads = workloads
        """Kinds that keep its pods."""
        self.label = f"{GROUP}/{word}"
        """On every child; its value is the resource's name."""

    @property
    def spellings(self) -> frozenset[str]:
        """What may stand before the slash."""
        plural = self.resource.partition(".")[0]
        return frozenset({self.word, self.kind.lower(), plural, self.resource, f"{self.kind.lower()}.{GROUP}"}) | (
            {"tsess"} if self is Kind.SESSION else {"spool"}
        )
