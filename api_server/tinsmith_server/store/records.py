"""Rows as the services see them: plain frozen values, times as aware UTC datetimes, and the clock that gives those."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
UsageKind = Literal["training", "prefill", "cached_prefill", "sample", "checkpoint", "storage"]


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key without its secret. `prefix` is what a human recognises it by."""

    key_id: int
    tenant: str
    name: str
    prefix: str
    created_at: datetime
    revoked_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """One run of a client program."""

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
    """Digest of the request that made it; None without an idempotency key."""


@dataclass(frozen=True, slots=True)
class Model:
    """A LoRA adapter with its optimizer: a training run. `model_id` is `<session>:train:<n>`.

    `accepted`: create or load is durable here but perhaps not yet at the worker, which is what
    `create_kind` ("create" or "load") and `create_payload` are kept for. `bound`: the worker has it.
    `worker_id` is empty until the model is placed, and stays when the model has ended.
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
    failure: str | None = None  # why, when failed or corrupted


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """An accepted model that is placed nowhere: as much of it as its turn depends on."""

    model_id: str
    tenant: str
    base_model: str
    lora_rank: int


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """A model that holds one of a worker's slots."""

    model_id: str
    session_id: str
    tenant: str
    worker_id: str
    last_request_at: datetime


@dataclass(frozen=True, slots=True)
class PlacementQueue:
    """Models that wait for a place at some workers, oldest first; who holds those places; and whose sessions go on."""

    waiting: tuple[WaitingModel, ...] = ()
    holders: tuple[SlotHolder, ...] = ()
    tenants_at_work: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Worker:
    """A journal. Its epoch fences older servers out; the cursor says which events are in here.

    `home` says where it was last seen, in the words of the fleet that saw it; empty before.
    """

    worker_id: str
    epoch: int
    instance_id: str
    event_cursor: int
    home: str = ""


@dataclass(frozen=True, slots=True)
class SamplingSession:
    """What `asample` names. `model_path` is a tinker path of kind sampler, or None.

    Opened by an ephemeral save: `model_id` and `checkpoint_directory` say which weights;
    `inflight` means: the newest inflight save of that model, this one at the oldest.
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
    """A name and the immutable directory it points to, relative to the checkpoint root.

    Unique by (run_id, type, name) among those not deleted; an ephemeral one is named by its
    sampling session. `epoch` and `event_id` order the writers: an older one never overwrites.
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
class Kept:
    """Named checkpoints: how many there are, and their bytes."""

    checkpoints: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used in the UTC hour that begins at `hour`: tokens, checkpoints, or byte seconds of storage.

    `session_id` is empty where it was no session's. Unique but for `amount`.
    """

    tenant: str
    session_id: str
    base_model: str
    hour: datetime
    kind: UsageKind
    amount: int


@dataclass(frozen=True, slots=True)
class StoredCheckpoints:
    """Those of a tenant that have a name, of one project or of none."""

    project_id: str | None
    count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a tenant's name stands for from `at` on: a checkpoint's path. `number` counts from 1; the last one counts.

    `before` is the number of what a rollback leads to, None where nothing is before it.
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
    """A checkpoint's path, which names of its tenant may stand for."""

    tenant: str
    tinker_path: str


@dataclass(frozen=True, slots=True)
class PromotionBounds:
    """Of a tenant's names, and of a name's changes: of those the newest stay."""

    names: int
    kept_per_name: int


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What a tenant did, to which checkpoint. `entry_id` is the store's."""

    tenant: str
    at: datetime
    event: str
    model_id: str
    tinker_path: str
    details: Mapping[str, Any] = field(default_factory=dict)
    entry_id: int = 0


Along = Sequence[Usage | AuditEntry]
"""What is written in one transaction with a change, and only if that changed something."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows of a longer list, newest first."""

    rows: tuple[T, ...]
    total: int


def utc_now() -> datetime:
    return datetime.now(UTC)
