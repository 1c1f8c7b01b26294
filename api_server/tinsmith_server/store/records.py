"""The rows of the store as frozen values with UTC datetimes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Generic, Literal, TypeVar, get_args

T = TypeVar("T")

Clock = Callable[[], datetime]

ModelState = Literal["accepted", "bound", "released", "failed", "corrupted"]
FinalState = Literal["released", "failed", "corrupted"]
FINAL_STATES: frozenset[str] = frozenset(get_args(FinalState))
LIVE: tuple[ModelState, ...] = ("accepted", "bound")
FinishType = Literal["success", "errored", "interrupted", "reaped"]
CheckpointType = Literal["training", "sampler", "external", "ephemeral"]
AuditKind = Literal["all", "checkpoints", "accounts"]
Role = Literal["admin", "member", "reader"]
UsageKind = Literal["training", "prefill", "cached_prefill", "sample", "checkpoint", "storage"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. A person can recognise the key by its `prefix`."""

    key_id: int
    tenant: str
    name: str
    prefix: str
    created_at: datetime
    revoked_at: datetime | None = None
    role: Role = "member"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """The limits that replace settings of the server for one tenant. A limit that is None replaces nothing."""

    tenant: str
    adapters: int | None = None
    queued_operations: int | None = None
    requests_per_second: float | None = None
    checkpoint_bytes: int | None = None
    checkpoints_kept: int | None = None
    share_weight: float | None = None


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """The valid keys, the live models, and the bytes of named checkpoints of a tenant."""

    tenant: str
    keys: int = 0
    adapters: int = 0
    checkpoint_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """A run of a client program."""

    session_id: str
    tenant: str
    created_at: datetime
    last_heartbeat_at: datetime
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    finished_at: datetime | None = None
    finish_type: FinishType | None = None
    finish_detail: str | None = None
    request_digest: str | None = None
    """The digest of the request that created the session, or None if the request had no idempotency key."""
    key_id: int | None = None
    """The key that created the session: 0 for the server's static key, and None if no key did."""


@dataclass(frozen=True, slots=True)
class Model:
    """A LoRA adapter and its optimizer. Clients call a model a training run. `model_id` is `<session>:train:<n>`.

    The state `accepted` means that the creation is durable in the store, but the worker may not have the model yet.
    `create_kind` ("create" or "load") and `create_payload` describe the creation for the worker. The state `bound`
    means that the worker has the model. `worker_id` is empty until the model is placed, and is kept after the model's
    end.
    """

    model_id: str
    session_id: str
    model_seq_id: int
    tenant: str
    base_model: str
    worker_id: str
    state: ModelState
    create_kind: Literal["create", "load"]
    create_payload: bytes
    lora_rank: int
    lora_alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: Mapping[str, Any]
    user_metadata: Mapping[str, str] | None
    created_at: datetime
    last_request_at: datetime
    failure: str | None = None  # the reason of a failed or corrupted model


@dataclass(frozen=True, slots=True)
class QueuedModel:
    """An accepted model without a worker.

    The record has only the fields that decide the model's position in the queue.
    """

    model_id: str
    tenant: str
    base_model: str
    lora_rank: int


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """A model that holds a slot of a worker."""

    model_id: str
    session_id: str
    tenant: str
    worker_id: str
    last_request_at: datetime


@dataclass(frozen=True, slots=True)
class PlacementQueue:
    """The models that wait for slots (oldest first), the models that hold slots, and the tenants with open sessions."""

    waiting: tuple[QueuedModel, ...] = ()
    holders: tuple[SlotHolder, ...] = ()
    tenants_at_work: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DeferredOperation:
    """An operation that was accepted while its model's worker could not be reached.

    `request` is a serialised SubmitRequest. The row is deleted when the operation is in the worker's journal, or when
    the model ends.
    """

    model_id: str
    seq_id: int
    tenant: str
    size_bytes: int
    request: bytes


@dataclass(frozen=True, slots=True)
class Worker:
    """The journal of a worker. The epoch blocks older servers; the cursor is the last event that was applied.

    `home` is the last known location of the worker, in the form that its fleet uses. `home` is empty if the worker was
    never seen.
    """

    worker_id: str
    epoch: int
    instance_id: str
    event_cursor: int
    home: str = ""


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """The model or checkpoint from which `asample` requests draw.

    `model_path` is a tinker path of the kind sampler, or None.

    An unnamed save opens a sampling session with `model_id` and `checkpoint_directory`. If `inflight` is True,
    `asample` requests draw from the newest inflight save of the model.
    """

    sampling_session_id: str
    session_id: str
    sampling_session_seq_id: int
    tenant: str
    base_model: str
    created_at: datetime
    model_path: str | None = None
    model_id: str | None = None
    inflight: bool = False
    checkpoint_directory: str | None = None
    manifest_digest: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A name, and its immutable directory, which is relative to the checkpoint root.

    Among checkpoints that are not deleted, (run_id, type, name) is unique. The name of an ephemeral checkpoint is the
    ID of its sampling session. `epoch` and `event_id` order the writes: an older write never replaces a newer one.
    """

    run_id: str
    type: CheckpointType
    name: str
    tenant: str
    base_model: str
    directory: str
    manifest_digest: str
    size_bytes: int
    epoch: int
    event_id: int
    seq_id: int
    lora_rank: int
    lora_alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    created_at: datetime
    expires_at: datetime | None = None
    public: bool = False
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointPosition:
    """The position of a checkpoint in a list that is ordered by age."""

    created_at: datetime
    run_id: str
    type: str
    name: str

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointPosition:
        return cls(checkpoint.created_at, checkpoint.run_id, checkpoint.type, checkpoint.name)

    @classmethod
    def parse(cls, created_at: datetime, key: str) -> CheckpointPosition:
        """Return the position with this key. A key in another form is before or after all others."""
        run_id, _, rest = key.partition("/")
        type_, _, name = rest.partition("/")
        return cls(created_at, run_id, type_, name)

    @property
    def key(self) -> str:
        return f"{self.run_id}/{self.type}/{self.name}"


@dataclass(frozen=True, slots=True)
class CheckpointFilter:
    """The conditions of a search for named checkpoints. None means that all are wanted."""

    tenant: str
    types: Collection[CheckpointType]
    base_models: Collection[str] | None = None
    project_ids: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class CheckpointTotals:
    """The number of named checkpoints, and their total size in bytes."""

    checkpoints: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage in the UTC hour that begins at `hour`: tokens, checkpoints, or storage in byte seconds.

    `session_id` is empty for usage that belongs to no session. All fields except `amount` form the key.
    """

    tenant: str
    session_id: str
    base_model: str
    hour: datetime
    kind: UsageKind
    amount: int


@dataclass(frozen=True, slots=True)
class StoredCheckpoints:
    """The named checkpoints of a tenant that are in one project, or in no project."""

    project_id: str | None
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Promotion:
    """The path of the checkpoint to which a tenant's name points from the time `at` on.

    `number` counts from 1. The promotion with the highest number is valid. `before` is the number of the promotion that
    a rollback restores, or None.
    """

    tenant: str
    name: str
    number: int
    tinker_path: str
    at: datetime
    before: int | None = None
    is_rollback: bool = False


@dataclass(frozen=True, slots=True)
class PromotedPath:
    """The path of a checkpoint, and the tenant whose names may point to this path."""

    tenant: str
    tinker_path: str


@dataclass(frozen=True, slots=True)
class PromotionBounds:
    """The limits on a tenant's names, and on the changes that are kept for each name."""

    names: int
    kept_per_name: int


@dataclass(frozen=True, slots=True)
class Recording:
    """The turns that an agent takes with a model, up to a number of turns, a size and a time.

    `turns` and `size_bytes` are the sums of the recorded turns. `model` is the name that the owner gave.
    """

    recording_id: str
    tenant: str
    model: str
    created_at: datetime
    expires_at: datetime
    most_turns: int
    most_bytes: int
    turns: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One answer of a recording.

    The prompt of the turn is the whole sequence of the turn `parent`, and then `prompt_tokens`. `reason` says why the
    turn begins where it does. Tokens are int32 and logprobs float32, in little-endian form. `message_digests` has one
    digest for each message after the messages of the parent; `settings_digest` is the digest of the tools and the
    variables of the chat template.
    """

    recording_id: str
    number: int
    parent: int | None
    reason: str
    model_path: str
    weights_digest: str
    finish_reason: str
    sampling: Mapping[str, Any]
    started_at: datetime
    ended_at: datetime
    settings_digest: bytes
    message_digests: bytes
    reasoning: bytes
    prompt_tokens: bytes
    sampled_tokens: bytes
    logprobs: bytes

    @property
    def size_bytes(self) -> int:
        parts = (self.message_digests, self.reasoning, self.prompt_tokens, self.sampled_tokens, self.logprobs)
        return sum(len(part) for part in parts)


@dataclass(frozen=True, slots=True)
class RunStep:
    """A point of a run's series: one optimizer step, or the mean of `steps` consecutive steps.

    `position` is the place of the (last) optim_step among the operations of the run, and `step` is the optimizer's
    number. A figure is None if it is unknown or not finite. `seconds` is the time on the engine.
    """

    run_id: str
    position: int
    step: int
    at: datetime
    tokens: int
    steps: int = 1
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    sampler_gap: float | None = None


@dataclass(frozen=True, slots=True)
class RunReport:
    """The values that a client has reported for a step, by name. Each change gets the next `revision` of the run."""

    run_id: str
    step: int
    revision: int
    at: datetime
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run, and the size of its series.

    `position` and `step` are those of the newest step; they are 0 before the first one. Rates are moving averages of
    the time between steps. `recent_losses` are float32 in little-endian form, newest last; NaN for a missing loss.
    `total_steps` is the number that the client has announced. `unfolded` is the number of points with one step.
    `revision` is the newest one of the client's reports, for which about `report_bytes` were written. `reports` is the
    number of these that have never been thinned out.
    """

    run_id: str
    position: int = 0
    step: int = 0
    at: datetime | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_per_step: float | None = None
    recent_losses: bytes = b""
    total_steps: int | None = None
    unfolded: int = 0
    revision: int = 0
    reports: int = 0
    report_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """An action of a tenant on a checkpoint, or a change of its keys or limits. The store assigns `entry_id`."""

    tenant: str
    at: datetime
    event: str
    model_id: str
    tinker_path: str
    details: Mapping[str, Any] = field(default_factory=dict)
    entry_id: int = 0


ExtraRows = Sequence[Usage | AuditEntry]
"""Rows that are written in the same transaction as a change, but only if the change has an effect."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows of a longer list, newest first."""

    rows: tuple[T, ...]
    total: int


def utc_now() -> datetime:
    return datetime.now(UTC)
