"""The TrainingSession and the fields of its spec. The CRD defines the bounds and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import ValidationError, model_validator
from typing_extensions import override

from tinsmith_operator.api.base import Resource, parse_quantity
from tinsmith_operator.api.names import CLAIM_FINALIZER, SESSION_KIND, SESSION_LABEL, WORKER_APPLICATION, claim_name
from tinsmith_operator.api.owner import Owner, Reconciled, effective_spec, identity_of, unreadable
from tinsmith_operator.api.serving_spec import GPU, Quantity, ServingSpec
from tinsmith_operator.api.status import TrainingSessionStatus


class Parallelism(Resource):
    """The parallelism settings of a session. `nodes` is the number of pods.

    The other fields are numbers of ranks: matrices, layers, sequences or experts are divided among this number of
    ranks.
    """

    nodes: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


ALONE = Parallelism()
"""The parallelism settings of a session without `parallelism` in the spec."""


CRD_MAX_RANK = 128


class Engine(StrEnum):
    PEFT = "peft"
    NEMO_RL = "nemo-rl"
    MILES = "miles"

    @property
    def divides(self) -> bool:
        """True if the engine divides the model among ranks. The ranks may run in several pods."""
        return self is not Engine.PEFT


class Numerics(StrEnum):
    EXACT = "exact"
    FAST = "fast"


class Quantization(StrEnum):
    EIGHT_BITS = "8bit"
    FOUR_BITS = "4bit"


class Sampling(StrEnum):
    NONE = "None"
    COLOCATED = "Colocated"


class AccessMode(StrEnum):
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"
    READ_WRITE_ONCE = "ReadWriteOnce"


class WhenDeleted(StrEnum):
    RETAIN = "Retain"
    DELETE = "Delete"


class Adapters(Resource):
    """The limits of adapters. The default of `max_rank` here differs from the default in the CRD.

    The hashes of pods leave this default out, so a changed default would restart each worker that has this value in its
    spec. A spec without `adapters` is read with the CRD's rank, so that it has the hash of a spec with it.
    """

    slots: int = 8
    model_places: int | None = None
    max_rank: int = 64


class ModelCache(Resource):
    claim_name: str


class RetentionPolicy(Resource):
    when_deleted: WhenDeleted = WhenDeleted.RETAIN


class Storage(Resource):
    size: Quantity = "10Gi"
    storage_class_name: str | None = None
    access_mode: AccessMode = AccessMode.READ_WRITE_ONCE_POD
    existing_claim: str | None = None
    retention_policy: RetentionPolicy = RetentionPolicy()

    @property
    def deletes_claim(self) -> bool:
        """True if the operator deletes the claim together with the session.

        The operator never deletes a claim that a user has created.
        """
        return self.retention_policy.when_deleted is WhenDeleted.DELETE and self.existing_claim is None


class TrainingSessionSpec(ServingSpec):
    engine: Engine = Engine.PEFT
    parallelism: Parallelism | None = None
    model_cache: ModelCache | None = None
    quantization: Quantization | None = None
    numerics: Numerics | None = None
    adapters: Adapters = Adapters()
    sampling: Sampling = Sampling.COLOCATED
    storage: Storage = Storage()
    suspend: bool = False

    @model_validator(mode="before")
    @classmethod
    def _fill_highest_rank(cls, spec: Any) -> Any:
        return {"adapters": {"maxRank": CRD_MAX_RANK}, **spec} if isinstance(spec, dict) else spec

    @property
    @override
    def model_claims(self) -> dict[str, str]:
        cache = {"spec.modelCache.claimName": self.model_cache.claim_name} if self.model_cache is not None else {}
        return {**super().model_claims, **cache}

    @property
    def divided(self) -> Parallelism:
        return self.parallelism or ALONE

    @property
    def is_group(self) -> bool:
        """True if the session runs in several pods."""
        return self.divided.nodes > 1

    @property
    def is_converted_once(self) -> bool:
        """True if a Job converts the model once, into the model cache.

        Miles reads the original files, and needs no Job.
        """
        return self.engine is Engine.NEMO_RL and self.model_cache is not None

    @property
    def gpus_per_node(self) -> int:
        """The number of GPUs in each pod, or 0 if the engine computes on the CPU."""
        return int(parse_quantity(self.resources.limits.get(GPU, 0))) if self.engine.divides else 0

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks in each pod: one rank for each GPU.

        Without GPUs, a pod has as many ranks as one copy of the model.
        """
        return self.gpus_per_node or self.divided.tensor * self.divided.pipeline

    @property
    def ranks(self) -> int:
        return self.divided.nodes * self.ranks_per_node

    @property
    def uses_ray(self) -> bool:
        """True if each rank runs in a separate process. A single rank on the CPU runs in the worker's process."""
        return self.engine.divides and (self.gpus_per_node > 0 or self.ranks > 1)


@dataclass(frozen=True)
class TrainingSession(Owner):
    KIND = SESSION_KIND
    NOUN = "session"
    LABEL = SESSION_LABEL
    APPLICATION = WORKER_APPLICATION
    COMPONENT = "worker"

    spec: TrainingSessionSpec
    status: TrainingSessionStatus

    @property
    @override
    def workload_name(self) -> str:
        return self.name

    @property
    def is_suspended(self) -> bool:
        """True if a user, or the operator because of idleness, has suspended the session."""
        return self.spec.suspend or self.is_suspended_as_idle

    @property
    def has_finalizer(self) -> bool:
        return CLAIM_FINALIZER in self.finalizers

    @property
    def claim_name(self) -> str:
        """The name of the claim that holds the worker's journal."""
        return self.spec.storage.existing_claim or claim_name(self.name)


@dataclass(frozen=True)
class PendingSession(Reconciled):
    """A session that names a template, and does not have the copy of the template yet."""

    KIND = SESSION_KIND
    NOUN = "session"

    template_name: str
    status: TrainingSessionStatus


def parse_pending(body: Mapping[str, Any]) -> PendingSession | None:
    """Return the session if it needs the copy of a template, otherwise None. Raises Unreadable."""
    named = (body.get("spec") or {}).get("templateRef")
    if named is None or "template" in (body.get("status") or {}):
        return None
    try:
        status = TrainingSessionStatus.model_validate(body.get("status") or {})
    except ValidationError as error:
        raise unreadable(SESSION_KIND, body, error) from error
    return PendingSession(**identity_of(body), template_name=str(named["name"]), status=status)


def parse_session(body: Mapping[str, Any]) -> TrainingSession:
    """Return the session. Raises Unreadable with the name of the invalid field."""
    try:
        return TrainingSession(
            **identity_of(body),
            spec=TrainingSessionSpec.model_validate(effective_spec(body)),
            status=TrainingSessionStatus.model_validate(body.get("status") or {}),
        )
    except ValidationError as error:
        raise unreadable(SESSION_KIND, body, error) from error
