"""What is observed of a session or pool: the input of a decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from typing_extensions import override

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.api.training_session import TrainingSession


@dataclass(frozen=True)
class CertificateFacts:
    """Of the leaf in a Secret, whoever wrote it, and of the authority beside it.

    authority_fingerprint: empty when that authority did not sign the leaf.
    """

    not_before: datetime
    not_after: datetime
    dns_names: tuple[str, ...]
    authority_fingerprint: str
    authority_not_after: datetime


@dataclass(frozen=True)
class WorkerReport:
    """What the worker in this pod last said of itself.

    adapters_used, model_places: models that it holds, and how many it takes, in memory or parked.
    running_seconds: of the microbatch, step or save that runs now; 0 when none does.
    snapshot_seconds: the longest that a snapshot of everything took since the worker started; 0 before the first.
    volume_full: it accepts no operation for want of room on the journal's volume.
    """

    pod_uid: str
    received_at: datetime
    epoch: int
    adapters_used: int
    model_places: int
    running_seconds: float
    snapshot_seconds: float
    last_snapshot_time: datetime | None
    volume_full: bool


@dataclass(frozen=True)
class SnapshotAnswer:
    """To a request for a snapshot. at: when everything was on disk; None where the worker refused it: `problem`."""

    request: str
    at: datetime | None
    problem: str | None = None


@dataclass(frozen=True)
class KubernetesWarning:
    """An Event of type Warning about an object of the namespace.

    kind: of the object, for example Pod, StatefulSet or PersistentVolumeClaim.
    at: when it was last seen.
    """

    kind: str
    uid: str
    reason: str
    message: str
    at: datetime


@dataclass(frozen=True)
class ReadJournal:
    """A claim that a session or pool would mount for its model, and that is for another session's journal.

    field: of the spec, that names it.
    """

    field: str
    claim: str
    session: str


@dataclass(frozen=True)
class Stored:
    """asked: the hash of a request. content: the hash of the object after it, without what others write."""

    asked: str
    content: str


@dataclass(frozen=True)
class ReadClaim:
    """The claim that a session names for its journal, and from which an earlier session or pool reads its model.

    reader: that session or pool, in words.
    """

    claim: str
    reader: str


@dataclass(frozen=True, kw_only=True)
class Surroundings(ABC):
    """What lies under the names of an owner's children, ours or not; None is "not there".

    authority_fingerprint: None when there is no authority that could issue anything.
    ca_problem: why certificates cannot be issued or stored, as a sentence.
    certificate: None also when the Secret holds nothing that can be read.
    snapshot: the latest answer of the session's worker to a request for one.
    read_journal: the first of the claims for its model that is some other session's journal.
    warnings: may be left empty while the owner is ready.
    stored: what the API server made of the latest create or apply of a kind, where that is not visibly what was asked
        for.
    refusals: what the API server said to the latest create or apply of a kind (status 400, 403 or 422), until one
        succeeds. The action is decided again each time; whoever acts spaces out the attempts.
    """

    authority_fingerprint: str | None
    workload: Manifest | None = None
    service: Manifest | None = None
    policy: Manifest | None = None
    certificate_secret: Manifest | None = None
    certificate: CertificateFacts | None = None
    snapshot: SnapshotAnswer | None = None
    read_journal: ReadJournal | None = None
    warnings: tuple[KubernetesWarning, ...] = ()
    stored: Mapping[str, Stored] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)
    ca_problem: str | None = None

    @property
    @abstractmethod
    def owner(self) -> Owner:
        """Whose children these are."""

    @property
    def read_claim(self) -> ReadClaim | None:
        """The claim for the owner's journal, if another session or pool has its model there."""
        return None

    @property
    def certificate_expiry_time(self) -> datetime | None:
        return self.certificate.not_after if self.certificate is not None else None

    @property
    def owned(self) -> tuple[Manifest | None, ...]:
        """What must belong to the owner by its owner reference, if it is there."""
        return (self.workload, self.service, self.certificate_secret, self.policy)


@dataclass(frozen=True, kw_only=True)
class Observed(Surroundings):
    """One session.

    claim: the one of `session.claim_name`, which may be a claim that somebody else made.
    claim_holder: another session that names the same claim and comes before this one, or whose worker's pod still
        has it.
    claim_reader: a session or pool, in words, that was made before this one and reads its model from that claim.
    pod: the one with the worker. members: the others of a session of several pods, by name.
    conversion: the Job that converts its model. converters: the pods of it, and of one before it while they are there.
    image_pull: the Job that pulls another image onto the worker's node. pullers: its pods, as `converters`.
    no_groups: why no session of several pods can be made here, as a sentence.
    report: the latest, of whatever pod sent it.
    has_turn: to restart for what nobody asked for: of many sessions only a few do at the same time.
    """

    session: TrainingSession
    claim: Manifest | None = None
    claim_holder: str | None = None
    claim_reader: str | None = None
    pod: Manifest | None = None
    members: tuple[Manifest, ...] = ()
    conversion: Manifest | None = None
    converters: tuple[Manifest, ...] = ()
    image_pull: Manifest | None = None
    pullers: tuple[Manifest, ...] = ()
    no_groups: str | None = None
    report: WorkerReport | None = None
    has_turn: bool = False

    @property
    @override
    def owner(self) -> TrainingSession:
        return self.session

    @property
    @override
    def read_claim(self) -> ReadClaim | None:
        return ReadClaim(self.session.claim_name, self.claim_reader) if self.claim_reader is not None else None

    @property
    @override
    def owned(self) -> tuple[Manifest | None, ...]:
        return (*super().owned, self.conversion, self.image_pull)


@dataclass(frozen=True, kw_only=True)
class ObservedPool(Surroundings):
    """One pool. pods: by name, those that its workload's replica sets made, of any revision."""

    pool: SamplerPool
    budget: Manifest | None = None
    pods: tuple[Manifest, ...] = ()

    @property
    @override
    def owner(self) -> SamplerPool:
        return self.pool

    @property
    @override
    def owned(self) -> tuple[Manifest | None, ...]:
        return (*super().owned, self.budget)
