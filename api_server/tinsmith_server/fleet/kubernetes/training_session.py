"""The fields of TrainingSessions that this server reads."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Json
from pydantic.alias_generators import to_camel

from tinsmith_server.fleet.kubernetes.api import Manifest
from tinsmith_server.fleet.kubernetes.watching import Key

TEMPLATE_LABEL = "tinsmith.dev/template"
"""The label on each session that a server or the operator has created from a template, with the template's name."""
RETIRED_ANNOTATION = "tinsmith.dev/retired-at"
"""The operator's annotation on a session that it deletes as soon as the session holds no models."""
DEFAULT_SLOTS, DEFAULT_MAX_RANK = 8, 128
DEADLINE_EXCEEDED = "DeadlineExceeded"
"""The reason of the Ready condition after `spec.activeDeadlineSeconds`."""


class Part(BaseModel):
    """A part of a Kubernetes object. Unknown fields are ignored, because a newer operator may add fields."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel)


class ModelPart(Part):
    name: str


class AdaptersPart(Part):
    """The adapters of a spec. The CRD has the same defaults, and stores no `adapters` if the user wrote none."""

    slots: int = DEFAULT_SLOTS
    max_rank: int = DEFAULT_MAX_RANK


class RetentionPart(Part):
    when_deleted: Literal["Retain", "Delete"] = "Retain"


class StoragePart(Part):
    retention_policy: RetentionPart = RetentionPart()


class IdlePolicyPart(Part):
    delete_after_seconds: int | None = None


class SpecPart(Part):
    model: ModelPart
    adapters: AdaptersPart = AdaptersPart()
    max_sequence_length: int | None = None
    sampling: Literal["None", "Colocated"] = "Colocated"
    storage: StoragePart = StoragePart()
    suspend: bool = False
    idle: IdlePolicyPart | None = None


class ConditionPart(Part):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class IdlePart(Part):
    suspended_time: datetime | None = None


class UsedPlacesPart(Part):
    used: int
    capacity: int


class StatusPart(Part):
    worker_id: str | None = None
    endpoint: str | None = None
    conditions: tuple[ConditionPart, ...] = ()
    idle: IdlePart = IdlePart()
    adapters: UsedPlacesPart | None = None


class MetadataPart(Part):
    name: str
    namespace: str
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)


class _Copy(Part):
    """A template's copy in the status of a session: the JSON text of the spec."""

    spec: Json[dict[str, Any]]


class _TrainingSession(Part):
    metadata: MetadataPart
    spec: SpecPart
    status: StatusPart = StatusPart()


@dataclass(frozen=True, slots=True)
class TrainingSession:
    """A TrainingSession: a base model in memory with the adapters of many clients.

    - `is_past_deadline`: the session has existed for longer than `spec.activeDeadlineSeconds`.
    - `template`: the template from which a server or the operator has created the session.
    - `is_retired`: the session takes no new models, because it has an outdated copy of its template.
    - `has_places`: the last report counts a free place, or there is no report.
    """

    name: str
    namespace: str
    template: str | None
    spec: SpecPart
    deleted: bool
    worker_id: str | None
    endpoint: str | None
    ready: bool
    stalled: bool
    message: str
    suspended_at: datetime | None = None
    is_past_deadline: bool = False
    has_places: bool = True
    is_retired: bool = False

    @property
    def key(self) -> Key:
        return self.namespace, self.name

    @property
    def title(self) -> str:
        """The session's name for messages, with its namespace."""
        return f"TrainingSession {self.namespace}/{self.name}"

    @property
    def model(self) -> str:
        return self.spec.model.name

    @property
    def samples(self) -> bool:
        return self.spec.sampling != "None"

    @property
    def at_work(self) -> bool:
        """True if the session's worker takes new models and samples."""
        return self.ready and not self.asleep and not self.spec.suspend and not self.deleted

    @property
    def asleep(self) -> bool:
        """True if the session is suspended because it was idle, and wakes at the next request."""
        return self.suspended_at is not None and not (self.spec.suspend or self.deleted or self.is_past_deadline)

    @property
    def coming(self) -> bool:
        """True if the session will be ready soon."""
        return not (
            self.ready or self.spec.suspend or self.deleted or self.stalled or self.asleep or self.is_past_deadline
        )

    @property
    def leaving(self) -> bool:
        """True if the session and its volume are going to be deleted."""
        return self.deleted and self.spec.storage.retention_policy.when_deleted == "Delete"

    def suits(self, rank: int, sampling: bool) -> bool:
        return not self.is_retired and rank <= self.spec.adapters.max_rank and (self.samples or not sampling)

    def unavailable_reason_text(self) -> str:
        """Return why the session is not ready, and what to do. Waiting clients see this text."""
        if self.leaving:
            return f"{self.title} is being deleted; its models are saved as checkpoints named autosave"
        if self.deleted:
            return (
                f"{self.title} is being deleted, but its volume is kept; a new session of the same name continues on it"
            )
        if self.spec.suspend:
            patch = '{"spec":{"suspend":false}}'
            return (
                f"{self.title} is suspended; resume it with: kubectl --namespace {self.namespace} "
                f"patch trainingsession {self.name} --type merge --patch '{patch}'"
            )
        if self.asleep:
            return f"waking session {self.name}: no client has used {self.title} for some time"
        return f"{self.title} is not ready: {self.message or 'its operator has not reconciled it yet'}"


def pending_template(manifest: Manifest) -> Key | None:
    """Return the template of a session that does not have the copy of the template yet, otherwise None."""
    named = (manifest.get("spec") or {}).get("templateRef")
    if named is None or "template" in (manifest.get("status") or {}):
        return None
    return manifest["metadata"]["namespace"], named["name"]


def parse_session(manifest: Manifest, template: SpecPart | None = None) -> TrainingSession:
    """Return the session. Raises pydantic's ValidationError for an invalid object.

    A session from a template runs by the copy in its status. Until the operator has written the copy, the present
    template counts.
    """
    parsed = _TrainingSession.model_validate({**manifest, "spec": template or _spec_of(manifest)})
    conditions = {condition.type: condition for condition in parsed.status.conditions}
    ready, stalled = conditions.get("Ready"), conditions.get("Stalled")
    return TrainingSession(
        name=parsed.metadata.name,
        namespace=parsed.metadata.namespace,
        template=parsed.metadata.labels.get(TEMPLATE_LABEL),
        spec=parsed.spec,
        deleted=parsed.metadata.deletion_timestamp is not None,
        worker_id=parsed.status.worker_id or None,
        endpoint=parsed.status.endpoint or None,
        ready=ready is not None and ready.status == "True",
        stalled=stalled is not None and stalled.status == "True",
        message=ready.message.rstrip(".") if ready is not None else "",
        suspended_at=parsed.status.idle.suspended_time,
        is_past_deadline=ready is not None and ready.reason == DEADLINE_EXCEEDED,
        is_retired=RETIRED_ANNOTATION in parsed.metadata.annotations,
        has_places=parsed.status.adapters is None or parsed.status.adapters.used < parsed.status.adapters.capacity,
    )


def _spec_of(manifest: Manifest) -> dict[str, Any]:
    """Return the spec by which the session runs. The parser of a copy limits its depth."""
    own: dict[str, Any] = manifest.get("spec") or {}
    copy = (manifest.get("status") or {}).get("template")
    return {**_Copy.model_validate(copy).spec, **own} if "templateRef" in own and copy is not None else own
