"""Bodies of the calls of administrators, and of the console's session."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field

from tinsmith_server.wire.requests import Request
from tinsmith_server.wire.responses import Response

MOST = 10**9
Role: TypeAlias = Literal["admin", "member", "reader"]


class ConsoleSessionResponse(Response):
    """The session of a console. `expires_at` is null if the server requires no keys."""

    tenant: str
    role: Role
    key_name: str
    csrf_token: str
    expires_at: datetime | None


class KeyEntry(Response):
    """A key without its secret. A person can recognise the key by its `prefix`."""

    key_id: int
    prefix: str
    tenant: str
    name: str
    role: Role
    created_at: datetime
    revoked_at: datetime | None = None


class KeysResponse(Response):
    keys: list[KeyEntry]


class NewKeyResponse(KeyEntry):
    """A new key. `key` is the secret, which no other answer contains."""

    key: str


class CreateKeyRequest(Request):
    tenant: str
    name: str = ""
    role: Role = "member"


class LimitsRequest(Request):
    """The limits of a tenant. A limit that is null or absent leaves the setting of the server in force."""

    # An unknown name would remove a limit that its sender means to set.
    model_config = ConfigDict(extra="forbid")

    adapters: Annotated[int, Field(ge=0, le=MOST)] | None = None
    queued_operations: Annotated[int, Field(ge=1, le=MOST)] | None = None
    requests_per_second: Annotated[float, Field(ge=0.02, le=1e6)] | None = None
    checkpoint_bytes: Annotated[int, Field(ge=0, le=2**60)] | None = None
    checkpoints_kept: Annotated[int, Field(ge=1, le=MOST)] | None = None
    share_weight: Annotated[float, Field(ge=0.1, le=10.0)] | None = None


class TenantLimitsResponse(Response):
    """The limits that are set for a tenant."""

    adapters: int | None = None
    queued_operations: int | None = None
    requests_per_second: float | None = None
    checkpoint_bytes: int | None = None
    checkpoints_kept: int | None = None
    share_weight: float | None = None


class TenantUse(Response):
    """The use of a tenant. `queued_operations` counts the operations that this server knows."""

    adapters: int
    queued_operations: int
    checkpoint_bytes: int


class TenantEntry(Response):
    """A tenant, the number of its valid keys, its limits and its use."""

    tenant: str
    keys: int
    limits: TenantLimitsResponse
    used: TenantUse


class TenantsResponse(Response):
    tenants: list[TenantEntry]


class WorkerEntry(Response):
    """A worker or sampler, with its last description. Only a worker that has described itself has all fields."""

    worker_id: str
    name: str
    base_model: str
    kind: Literal["trainer", "sampler"]
    state: Literal["running", "draining", "full", "silent", "stopped"]
    """`silent`: connected, but without an answer to the last question; `full`: its volume has no space."""
    running_seconds: float | None = None
    idle_seconds: float | None = None
    models: int | None = None
    models_parked: int | None = None
    model_places: int | None = None
    slots: int | None = None
    queued: int | None = None
    samples_active: int | None = None
    samples_waiting: int | None = None
    trained_tokens: int | None = None
    sampled_tokens: int | None = None
    sampled_tokens_per_second: float | None = None
    prefilled_tokens: int | None = None
    operations_done: int | None = None
    operations_failed: int | None = None
    adapters_evicted: int | None = None
    journal_operations: int | None = None
    journal_bytes: int | None = None
    volume_free_bytes: int | None = None
    last_snapshot_at: datetime | None = None
    engine: str | None = None
    numerics: str | None = None
    quantization: str | None = None
    max_rank: int | None = None


class WorkersResponse(Response):
    workers: list[WorkerEntry]
