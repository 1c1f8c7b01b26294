"""JSON answers to the SDK. The SDK checks answers strictly, so a missing field or an additional null is an error."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Response(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Empty(Response):
    """The object `{}`, for answers of which the SDK reads only the status."""


class HealthResponse(Response):
    status: Literal["ok"] = "ok"


class ClientConfigResponse(Response):
    """Feature flags of the SDK. If a flag is missing, the SDK keeps its default."""

    pjwt_auth_enabled: bool
    # These flags request training data in protobuf (from SDK 0.19 on), and `forward` as a call of forward_backward
    # (from 0.22.3 on). SDKs from 0.25 on do both without a flag.
    proto_write_fwdbwd: bool = True
    fwd_via_fwdbwd: bool = True
    proto_compress_fwdbwd: bool
    sample_use_retrieve_futures: bool
    sample_join_sampling_session: bool = True
    custom_loss_server_side: bool = Field(description="whether all workers run them")


class TokenResponse(Response):
    jwt: str


class OrganizationName(Response):
    name: str


class UserAddress(Response):
    email: str


class KeyDetails(Response):
    """A key in the form that the vendor's API uses. Here, a key belongs to a tenant."""

    org_details: OrganizationName
    user_details: UserAddress


class KeyResponse(Response):
    key_id: int
    name: str
    note: str
    role: Literal["admin", "member", "reader"]
    details: KeyDetails


class DynamicConfigResponse(Response):
    sample_cancel_enabled: bool = True


class CreateSessionResponse(Response):
    session_id: str
    type: Literal["create_session"] = "create_session"


class SessionsResponse(Response):
    sessions: list[str]


class SessionResponse(Response):
    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class TelemetryResponse(Response):
    status: Literal["accepted"] = "accepted"


class FutureResponse(Response):
    """A future without the type of its result."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class PendingResponse(Response):
    queue_state: Literal["active", "paused_capacity"]
    queue_state_reason: str | None = None


class PlainSampleResponse(FutureResponse):
    """A sample.

    If the request has opened a sampling session, `sampling_session_id` is the ID of this session, for the next sample.
    """

    sampling_session_id: str


class SamplingClientResponse(Response):
    """A sampling client. `sampling_client_id` and `sampling_session_id` are two names for the same ID."""

    sampling_client_id: str
    sampling_session_id: str
    base_model: str
    model_path: str | None = None
    status: Literal["ready"] = "ready"


class DeletedModelResponse(Response):
    model_id: str
    status: Literal["deleted"] = "deleted"


class TokenizerResponse(Response):
    """A tokenizer. Fields are null until a worker of the model has answered."""

    tokenizer_id: str
    tokenizer_type: Literal["HuggingFace"] = "HuggingFace"
    vocab_size: int | None
    model_max_length: int | None


class MetadataResponse(Response):
    status: Literal["complete_metadata"] = "complete_metadata"
    response_payload_size: int


class FailedResponse(Response):
    error: str
    category: Literal["user", "server", "unknown"]


class CompletionResponse(Response):
    """A sample that has ended. A sample has a size only if it has a result.

    The size tells the SDK how much memory the result needs.
    """

    state: Literal["finished", "failed"]
    request_id: str
    response_payload_uncompressed_size: int | None = None


class RetrieveFuturesResponse(Response):
    completions: list[CompletionResponse]
    cursor: int


class ModelData(Response):
    arch: str | None = None
    model_name: str
    tokenizer_id: str


class GetInfoResponse(Response):
    model_id: str
    model_data: ModelData
    model_name: str
    is_lora: bool = True
    lora_rank: int
    optimizer_config: dict[str, Any]
    type: Literal["get_info"] = "get_info"


class CreateSamplingSessionResponse(Response):
    sampling_session_id: str
    type: Literal["create_sampling_session"] = "create_sampling_session"


class JoinSamplingSessionResponse(Response):
    client_counter: int
    type: Literal["join_sampling_session"] = "join_sampling_session"


class SamplerResponse(Response):
    sampler_id: str
    base_model: str
    model_path: str | None = None


class SupportedModel(Response):
    """A served model and its capabilities. A capability is None if no running worker has described it.

    The SDK ignores all fields after `sampleable`.
    """

    model_name: str
    max_context_length: int | None = None
    trainable: bool = True
    sampleable: bool = True
    images: bool | None = None
    audio: bool = False
    losses: list[str] | None = None
    optimizers: list[str] = Field(default_factory=list)
    modules: list[str] | None = None
    max_rank: int | None = None
    max_sampling_rank: int | None = None
    quantization: str | None = None
    stored_as: str | None = None
    numerics: str | None = None


class CapabilitiesResponse(Response):
    supported_models: list[SupportedModel]


class WaitingModel(Response):
    """A model without a worker. The SDK does not request this object."""

    model_id: str
    base_model: str
    waiting_seconds: float
    reason: str | None
    queue_position: int | None = None


class WaitingModelsResponse(Response):
    waiting_models: list[WaitingModel]


class CheckpointResponse(Response):
    checkpoint_id: str
    checkpoint_type: Literal["training", "sampler", "external"]
    time: datetime
    tinker_path: str
    size_bytes: int
    public: bool
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    base_model: str


class Cursor(Response):
    offset: int
    limit: int
    total_count: int


class CheckpointsResponse(Response):
    checkpoints: list[CheckpointResponse]
    cursor: Cursor | None = None


class RunProgressResponse(Response):
    """The progress of a run. `loss` is that of the newest step, and `tokens_per_second` a moving average."""

    step: int
    last_step_at: datetime
    loss: float | None = None
    tokens_per_second: float | None = None
    total_steps: int | None = None
    eta_seconds: float | None = None


class TrainingRunResponse(Response):
    """A training run. The SDK ignores all fields from `created_at` on."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    lora_rank: int
    corrupted: bool
    last_request_time: datetime
    last_checkpoint: CheckpointResponse | None = None
    last_sampler_checkpoint: CheckpointResponse | None = None
    user_metadata: dict[str, str] | None = None
    created_at: datetime
    session_id: str
    display_name: str | None = None
    state: Literal["waiting", "ready", "parked", "released", "failed", "corrupted"]
    failure: str | None = None
    waiting_reason: str | None = None
    queue_position: int | None = None
    queued_operations: int | None = None
    progress: RunProgressResponse | None = None
    losses: list[float | None] | None = None


class RunStepResponse(Response):
    """An optimizer step, or the mean of `steps` consecutive steps. A figure that is unknown or not finite is left out.

    `loss` is the mean over the trained tokens of the gradients that the step used, `seconds` the time on the engine,
    and `sampler_gap` the mean difference between the trainer's and the sampler's logprobs.
    """

    position: int
    step: int
    time: datetime
    steps: int
    tokens: int
    loss: float | None = None
    grad_norm: float | None = None
    learning_rate: float | None = None
    seconds: float | None = None
    sampler_gap: float | None = None


class RunReportResponse(Response):
    """Values that a client has reported for a step. A later revision of the same step replaces this one."""

    revision: int
    step: int
    time: datetime
    values: dict[str, float]


class RunMetricsResponse(Response):
    """A part of a run's series, oldest first. `after` and `after_reported` are the cursors of the next request."""

    steps: list[RunStepResponse]
    reported: list[RunReportResponse]
    after: int
    after_reported: int
    more: bool


class TrainingRunsResponse(Response):
    training_runs: list[TrainingRunResponse]
    cursor: Cursor


class ExternalUrlsResponse(Response):
    urls: dict[str, str]
    expires: datetime


class UploadStartResponse(Response):
    upload_id: str
    urls: dict[str, str]
    expires: datetime


class UploadFinishResponse(Response):
    tinker_path: str


class CopyWeightsResponse(Response):
    tinker_path: str


class PromotionResponse(Response):
    """A name, and the path to which it has pointed since `time`."""

    name: str
    model_path: str
    time: datetime
    number: int
    is_rollback: bool


class PromotionsResponse(Response):
    promotions: list[PromotionResponse]


class RecordingResponse(Response):
    """A recording, with its limits and its size. `base_url` is the base URL of the agent's OpenAI client."""

    recording_id: str
    model: str
    base_url: str
    created_at: datetime
    expires_at: datetime
    max_turns: int
    max_bytes: int
    turns: int
    size_bytes: int


class RecordingsResponse(Response):
    recordings: list[RecordingResponse]
    total: int


class RecordedSegment(Response):
    """An answer in a sequence: the tokens from `start` to before `end` were drawn in the turn `turn`."""

    turn: int
    start: int
    end: int
    reason: str = Field(description="why the turn begins where it does")
    model_path: str
    weights_digest: str
    finish_reason: str
    sampling_params: dict[str, Any]
    started_at: datetime
    ended_at: datetime


class RecordedSequence(Response):
    """The tokens that the model has read and drawn from the beginning of a conversation to its last answer.

    `mask` is 1 for each drawn token, except for tokens that have mask 1 in another sequence. Other tokens have logprob
    0. A sequence is `abandoned` if its first own prompt was answered again, and the agent continued with that answer.
    """

    sequence: int = Field(description="the number of the last turn")
    reason: str = Field(description="why the sequence leaves the other sequences")
    abandoned: bool
    tokens: list[int]
    logprobs: list[float]
    mask: list[int]
    segments: list[RecordedSegment]


class RecordedResponse(RecordingResponse):
    sequences: list[RecordedSequence]


class WeightsInfoResponse(Response):
    base_model: str
    is_lora: bool = True
    lora_rank: int
    train_unembed: bool
    train_mlp: bool
    train_attn: bool
    optimizer_config: dict[str, Any] | None = None


class TrainingUsage(Response):
    """The tokens in the inputs of forward passes, with or without a backward pass."""

    type: Literal["training"] = "training"
    token_count: int


class PrefillUsage(Response):
    """The tokens of prompts. Each prompt counts once for all its samples, and `cached` tokens were not computed."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SampledUsage(Response):
    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class CheckpointUsage(Response):
    """Checkpoints that were saved under a name, or imported."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


class StorageUsage(Response):
    """Stored data; a gigabyte has 10^9 bytes."""

    type: Literal["storage"] = "storage"
    free: bool = False
    gigabyte_hours: float


UsageInfo = TrainingUsage | PrefillUsage | SampledUsage | CheckpointUsage | StorageUsage


class UsageEvent(Response):
    """An event of usage. There are no prices, so the SDK's fields for costs are left out."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str
    user_name: str
    session_id: str | None = None
    project_id: str | None = None
    event_info: UsageInfo


class UsageSession(Response):
    user_metadata: Mapping[str, str] | None = None


class UsageResponse(Response):
    data: list[UsageEvent]
    sessions: dict[str, UsageSession]


class StoredCheckpointsItem(Response):
    project_id: str | None = None
    org_user_urn: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float


class StoredCheckpointsResponse(Response):
    data: list[StoredCheckpointsItem]


class AuditLogEntry(Response):
    """An entry of the audit log.

    `model_id` and `tinker_path` repeat fields of the details, for programs with older SDKs. Entries about keys and
    limits do not have these fields.
    """

    timestamp: datetime
    event: str
    event_details: dict[str, Any]
    model_id: str | None
    tinker_path: str | None


class AuditLogResponse(Response):
    entries: list[AuditLogEntry]


class TraceExportResponse(Response):
    status: Literal["ready"]
    url: str
