"""JSON bodies in the form in which the SDK sends them.

Unknown fields are ignored, because newer SDKs may send more fields.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tinsmith_server.wire.ids import LAST_CLIENT, check_name
from tinsmith_server.wire.json_bodies import decode_base64

TTL_MIN_SECONDS = 3600
TTL_MAX_SECONDS = 10 * 365 * 24 * 3600
MAX_SAMPLES = 1024
MAX_STOPS = 1024
MAX_TAGS = 64
MAX_AGE_RECIPIENTS = 10
# This limit is low because many requests read a row's metadata, and pages have a thousand rows.
METADATA_BYTES = 8192
METADATA_KEYS = 128

# Each kind of chunk has a field that no other kind has. In SDKs below 0.6 an image also has `tokens`.
TYPE_OF_FIELD = {"data": "image", "location": "image_asset_pointer", "dmel": "dmel", "tokens": "encoded_text"}
IMAGES = ("image", "image_asset_pointer")

T = TypeVar("T")


def bounded_metadata(value: dict[str, T]) -> dict[str, T]:
    """Return the metadata. Raises ValueError if the metadata is too large."""
    if len(value) > METADATA_KEYS:
        raise ValueError(f"user_metadata has {len(value)} keys; at most {METADATA_KEYS} are kept")
    if (size := len(orjson.dumps(value))) > METADATA_BYTES:
        raise ValueError(f"user_metadata has {size} bytes as JSON; at most {METADATA_BYTES} are kept")
    return value


def whole_numbers(value: object) -> array[int]:
    """Return the numbers of a list. The value of a long list is the array that `wire/json_bodies.py` has made."""
    if isinstance(value, array):
        return value
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise PydanticCustomError("whole_numbers", "must be a list of whole numbers")
    try:
        return array("q", value)
    except OverflowError:
        raise PydanticCustomError("whole_numbers", "contains a number outside 64 bits") from None


def base64_text(value: object) -> bytes:
    """Return the decoded base64 text.

    The value of a long text is the `bytes` object that `wire/json_bodies.py` has made.
    """
    if not isinstance(value, str | bytes):
        raise PydanticCustomError("base64", "must be text in base64")
    try:
        return decode_base64(value.encode() if isinstance(value, str) else value)
    except ValueError:
        raise PydanticCustomError("base64", "is not base64") from None


def few_stops(value: object) -> object:
    if isinstance(value, array | list) and len(value) > MAX_STOPS:
        raise PydanticCustomError("few_stops", "may have at most {most} entries", {"most": MAX_STOPS})
    return value.tolist() if isinstance(value, array) else value


Metadata = Annotated[dict[str, str], AfterValidator(bounded_metadata)]
Words = Annotated[list[str], Field(fail_fast=True)]
WholeNumbers = Annotated[
    Sequence[int],
    PlainValidator(whole_numbers),
    WithJsonSchema({"type": "array", "items": {"type": "integer"}}),
]
Base64 = Annotated[bytes, PlainValidator(base64_text), WithJsonSchema({"type": "string", "format": "byte"})]
Name = Annotated[str, AfterValidator(check_name)]
TtlSeconds = Annotated[int, Field(ge=TTL_MIN_SECONDS, le=TTL_MAX_SECONDS)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
NonNegative = Annotated[Finite, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Fraction = Annotated[Finite, Field(ge=0, lt=1)]


class Request(BaseModel):
    """The base class of all bodies.

    Validation is strict: strings are not converted to numbers, and numbers are not converted to strings.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, protected_namespaces=())


# ---- sessions


class ClientConfigRequest(Request):
    sdk_version: str = ""


class CreateSessionRequest(Request):
    tags: Annotated[Words, Field(max_length=MAX_TAGS)] = []
    user_metadata: Annotated[dict[str, Any], AfterValidator(bounded_metadata)] = {}
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionHeartbeatRequest(Request):
    session_id: str


class FinishReason(Request):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(Request):
    reason: FinishReason
    detail: str | None = None


# ---- models


class LoraConfig(Request):
    """The LoRA settings. The SDK has no alpha and no dropout; the server chooses the scaling."""

    rank: Annotated[int, Field(lt=2**31)] = 32
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True

    @field_validator("rank")
    @classmethod
    def _is_an_adapter(cls, rank: int) -> int:
        if rank == 0:
            raise ValueError(
                "lora_config.rank is 0: this server trains LoRA adapters, not all weights; use rank 1 or more"
            )
        if rank < 0:
            raise ValueError(f"lora_config.rank is {rank}; use rank 1 or more")
        return rank

    @model_validator(mode="after")
    def _trains_something(self) -> LoraConfig:
        if not (self.train_unembed or self.train_mlp or self.train_attn):
            raise ValueError("at least one of train_unembed, train_mlp and train_attn must be true")
        return self


class OptimizerConfig(BaseModel):
    """The choice of an optimizer, by the optimizer's tag. Each optimizer has its own fields."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    type: str = "adamw"


class CreateModelRequest(Request):
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str
    lora_config: LoraConfig = LoraConfig()
    optimizer_config: OptimizerConfig = OptimizerConfig()
    user_metadata: Metadata | None = None


class GetInfoRequest(Request):
    model_id: str


class UnloadModelRequest(Request):
    model_id: str


# ---- training operations


class AdamParams(Request):
    learning_rate: NonNegative = 1e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: NonNegative = 1e-12
    weight_decay: NonNegative = 0.0
    grad_clip_norm: NonNegative = 0.0


class OptimStepRequest(Request):
    model_id: str
    seq_id: int | None = None
    adam_params: AdamParams | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveWeightsRequest(Request):
    model_id: str
    seq_id: int | None = None
    path: Name
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveWeightsForSamplerRequest(Request):
    """A save for sampling.

    A save with `path` makes a persistent checkpoint, and a save with `sampling_session_seq_id` makes an ephemeral
    checkpoint.
    """

    model_id: str
    seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    path: Name | None = None
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ttl_seconds: TtlSeconds | None = None
    user_metadata: Metadata | None = None

    @model_validator(mode="after")
    def _has_one_target(self) -> SaveWeightsForSamplerRequest:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("exactly one of path and sampling_session_seq_id is needed")
        return self


class SaveWeightsExternalRequest(Request):
    model_id: str
    seq_id: int | None = None
    path: Name
    ttl_seconds: TtlSeconds | None = None
    age_encryption_recipients: Annotated[Words, Field(max_length=MAX_AGE_RECIPIENTS)] | None = None


class LoadWeightsRequest(Request):
    """A load: into an existing model (`model_id`, `seq_id`), or into a new model (`session_id`, `model_seq_id`)."""

    path: str
    # SDKs below 0.6 do not have this field. Their only kind of load is a resume, with the optimizer.
    optimizer: bool = True
    weights_access_token: str | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: OptimizerConfig = OptimizerConfig()


# ---- sampling


class SamplingSource(Request):
    """The source of samples. The SDK sends both fields.

    If both are set, `base_model` is only the base model that the client expects for `model_path`.
    """

    base_model: str | None = None
    model_path: str | None = None

    @model_validator(mode="after")
    def _is_named(self) -> SamplingSource:
        if self.base_model is None and self.model_path is None:
            raise ValueError("base_model or model_path is needed")
        return self


class CreateSamplingSessionRequest(SamplingSource):
    session_id: str
    sampling_session_seq_id: Annotated[int, Field(ge=0, lt=2**31)]


class JoinSamplingSessionRequest(Request):
    sampling_session_id: str


def chunk_of_today(value: object) -> object:
    """Return a chunk in the form of the current SDK.

    SDKs below 0.18 send no type, and SDKs below 0.6 send the size of an image as `tokens`.
    """
    if not isinstance(value, dict):
        return value
    chunk = dict(value)
    if "type" not in chunk:
        found = (type for field, type in TYPE_OF_FIELD.items() if field in chunk)
        chunk["type"] = next(found, None)
    if chunk["type"] in IMAGES and "tokens" in chunk:
        chunk["expected_tokens"] = chunk.pop("tokens")
    return chunk


class Chunk(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)
    type: str
    tokens: WholeNumbers | None = None
    data: Base64 | None = None
    location: str | None = None
    format: str = ""
    expected_tokens: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, value: object) -> object:
        return chunk_of_today(value)


class ModelInput(Request):
    chunks: Annotated[list[Chunk], Field(fail_fast=True)]


class SamplingParams(Request):
    max_tokens: Count | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[str | Words | Annotated[list[int], Field(fail_fast=True)] | None, BeforeValidator(few_stops)] = None
    temperature: NonNegative = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0


class TokenTensor(Request):
    """Token IDs `[rows, columns]`. The token IDs are dense, or in compressed sparse rows."""

    data: WholeNumbers
    dtype: Literal["int64"]
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**63)]], Field(fail_fast=True)]
    sparse_crow_indices: WholeNumbers | None = None
    sparse_col_indices: WholeNumbers | None = None

    @model_validator(mode="after")
    def _is_dense_or_sparse(self) -> TokenTensor:
        if (self.sparse_crow_indices is None) != (self.sparse_col_indices is None):
            raise ValueError("sparse_crow_indices and sparse_col_indices must be given together")
        return self


class SampleRequest(Request):
    sampling_session_id: str
    seq_id: int
    prompt: ModelInput
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    sampling_params: SamplingParams = SamplingParams()
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: Count | None = None
    topk_prompt_logprobs: Count = 0
    topk_sample_logprobs: Count = 0
    target_prompt_logprobs: TokenTensor | None = None
    prompt_alt_tokens_k: Count = 0
    # This field has no effect. It is for stable_reinforce, which needs the sampler's logprobs, and its datums contain
    # these.
    record_stability_info: bool = False


# ---- futures


class RetrieveFutureRequest(Request):
    request_id: str
    allow_metadata_only: bool = False


class SamplingSessionTarget(Request):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: Annotated[int, Field(ge=0, le=LAST_CLIENT)] = 0


class RetrieveFuturesRequest(Request):
    """A poll for ended samples. Without a `timeout`, the server holds the poll.

    A server may forget the samples in `retrieved_request_ids`. This server keeps the samples in `retrieved_request_ids`
    like all other samples.
    """

    target: SamplingSessionTarget
    prev_cursor: Annotated[int, Field(ge=0, lt=2**62)] = 0
    timeout: NonNegative | None = None
    retrieved_request_ids: Words = []


class CancelFutureRequest(Request):
    request_id: str


# ---- runs


# A database cannot hold the first and last hours of the calendar in each time zone.
FIRST_TIME, LAST_TIME = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
ReportTime = Annotated[AwareDatetime, Field(strict=False, ge=FIRST_TIME, lt=LAST_TIME)]


class RunMetricsPoint(Request):
    """Values that a program reports for a step. A value of null is ignored: JSON has no NaN."""

    step: Annotated[int, Field(ge=0, lt=2**53)]
    values: Annotated[dict[Annotated[str, Field(min_length=1, max_length=128)], Finite | None], Field(max_length=64)]
    time: ReportTime | None = None

    @property
    def known(self) -> dict[str, float]:
        return {name: value for name, value in self.values.items() if value is not None}


class RunMetricsRequest(Request):
    """Values of some steps. `total_steps` is the number of steps that the program will run, if it knows the number."""

    metrics: Annotated[list[RunMetricsPoint], Field(max_length=100)]
    total_steps: Annotated[int | None, Field(ge=1, lt=2**53)] = None


# ---- checkpoints


class TtlRequest(Request):
    ttl_seconds: TtlSeconds | None


class UploadStartRequest(Request):
    """The request that starts the import of an external adapter. SDK 0.39 sends this request."""

    base_model: str
    lora_config: LoraConfig
    # The id is contained in the links.
    destination_project_id: str | None = Field(None, max_length=256)


class UploadFinishRequest(Request):
    upload_id: str


class CopyWeightsRequest(Request):
    """A copy into a new run. The run is in a project, or in no project.

    Any other destination is refused. The SDK never sends another destination.
    """

    source_path: str
    destination_project_id: str | None = Field(None, max_length=256)
    ttl_seconds: TtlSeconds | None = None
    session_id: None = None
    model_seq_id: None = None


class WeightsInfoRequest(Request):
    tinker_path: str
