"""The observed state of a session or pool, which is the input of a decision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from typing_extensions import override

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.owner import Owner
from tinsmith_operator.api.sampler_pool import SamplerPool
from tinsmith_operator.api.training_session import TrainingSession


@dataclass(frozen=True)
class CertificateFacts:
    """The facts about the certificate and the authority in a Secret.

    `authority_fingerprint` is the fingerprint of the authority in this Secret. The fingerprint is empty if the
    authority did not sign the certificate.
    """

    not_before: datetime
    not_after: datetime
    dns_names: tuple[str, ...]
    authority_fingerprint: str
    authority_not_after: datetime


class ModelStep(NamedTuple):
    """A model that a worker holds, and the number of its optimizer steps."""

    model: str
    step: int


@dataclass(frozen=True)
class WorkerReport:
    """The latest report of the worker in this pod.

    - `adapters_used`: the number of models that the worker holds, in memory or parked.
    - `model_places`: the largest number of models that the worker accepts.
    - `running_seconds`: how long the present microbatch, step or save has been running; 0 if the worker is idle.
    - `snapshot_seconds`: the duration of the longest complete snapshot since the worker started; 0 before the first
      snapshot.
    - `volume_full`: the worker accepts no operation, because the journal's volume is full.
    - `idle_seconds`: the seconds since the last call for a client ended; 0 while work runs or waits.
    - `instance`: a text that differs at every start of the worker's process.
    - `trained_tokens`: the tokens that the process has trained since its start.

    Reports that differ only in the training progress are equal, because no decision depends on the progress.
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
    idle_seconds: float = 0.0
    instance: str = field(default="", compare=False)
    models: tuple[ModelStep, ...] = field(default=(), compare=False)
    trained_tokens: int = field(default=0, compare=False)


@dataclass(frozen=True)
class SnapshotAnswer:
    """The answer to a request for a snapshot.

    - `at`: the time when all data was on disk, or None if the worker refused.
    - `problem`: why the worker refused.
    """

    request: str
    at: datetime | None
    problem: str | None = None


@dataclass(frozen=True)
class KubernetesWarning:
    """A Warning Event about an object in the namespace.

    - `kind`: the kind of that object, for example Pod, StatefulSet or PersistentVolumeClaim.
    - `at`: the time when the Event last occurred.
    """

    kind: str
    uid: str
    reason: str
    message: str
    at: datetime


@dataclass(frozen=True)
class ReadJournal:
    """A claim that a session or pool names for its model, although the claim holds the journal of another session.

    `field` is the field of the spec that names the claim.
    """

    field: str
    claim: str
    session: str


@dataclass(frozen=True)
class Stored:
    """The object that the API server stored for a request.

    - `request`: the hash of the request.
    - `content`: the hash of the stored object, without fields that other managers have written.
    """

    request: str
    content: str


@dataclass(frozen=True)
class ReadClaim:
    """The claim of a session's journal, if an older session or pool reads a model from this claim.

    `reader` is the kind and name of the older session or pool.
    """

    claim: str
    reader: str


@dataclass(frozen=True, kw_only=True)
class Surroundings(ABC):
    """The objects that have the names of an owner's children, including foreign objects. A missing object is None.

    - `authority_fingerprint`: the fingerprint of the valid authority; None if no authority can issue certificates.
    - `ca_problem`: a sentence that says why certificates cannot be issued or stored.
    - `certificate`: the facts about the certificate; None if the Secret is missing or holds no readable certificate.
    - `snapshot`: the latest answer of the session's worker to a request for a snapshot.
    - `read_journal`: the first claim for the model that holds the journal of another session.
    - `warnings`: may be empty while the owner is ready.
    - `stored`: by kind, the object that the API server stored for the latest create or apply, if the object differs
      from the request.
    - `refusals`: by kind, the API server's message if the latest create or apply was refused (status 400, 403 or 422).
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
        """The session or pool that owns the children."""

    @property
    def read_claim(self) -> ReadClaim | None:
        """The claim for the owner's journal, if another session or pool reads a model from this claim."""
        return None

    @property
    def certificate_expiry_time(self) -> datetime | None:
        return self.certificate.not_after if self.certificate is not None else None

    @property
    def owned(self) -> tuple[Manifest | None, ...]:
        """The objects that must have an owner reference that names the owner."""
        return (self.workload, self.service, self.certificate_secret, self.policy)


@dataclass(frozen=True, kw_only=True)
class Observed(Surroundings):
    """The observed state of one session.

    - `claim`: the claim named `session.claim_name`; a user may have created this claim.
    - `claim_holder`: another session that uses the same claim, or whose worker still mounts the claim.
    - `claim_reader`: the kind and name of an older session or pool that reads a model from the claim.
    - `pod`: the worker's pod.
    - `members`: the other pods of a session with several nodes, by name.
    - `conversion`: the Job that converts the model.
    - `converters`: the pods of the present and of earlier conversion Jobs.
    - `image_pull`: the Job that pulls a new image onto the worker's node.
    - `pullers`: the pods of the present and of earlier image pull Jobs.
    - `no_groups`: a sentence that says why sessions with several nodes cannot run in this cluster.
    - `report`: the latest report of the worker, from the present pod or an earlier pod.
    - `default_image_digest`: the digest that a ready worker of the namespace runs as the default image; None: unknown.
    - `has_turn`: the session may restart automatically now. The number of sessions that may restart automatically at
      the same time is limited.
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
    default_image_digest: str | None = None
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
    """The observed state of one pool.

    - `pods`: the pods of the pool's Deployment from all ReplicaSets, by name.
    - `reports`: the latest report of each pod that was called, by the pod's UID.
    """

    pool: SamplerPool
    budget: Manifest | None = None
    pods: tuple[Manifest, ...] = ()
    reports: Mapping[str, WorkerReport] = field(default_factory=dict)

    @property
    @override
    def owner(self) -> SamplerPool:
        return self.pool

    @property
    @override
    def owned(self) -> tuple[Manifest | None, ...]:
        return (*super().owned, self.budget)
