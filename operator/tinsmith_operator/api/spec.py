"""The spec of a TrainingSession.

The CRD is the authority: it has the bounds, the defaults and the words. The defaults here are the same (a test compares
them), for objects that were stored before a field had its default.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tinsmith_operator.api.base import Manifest, Resource, parse_quantity

GPU = "nvidia.com/gpu"
"""The resource that a session asks for to train on GPUs with engine nemo-rl: whole ones."""


class Parallelism(Resource):
    """nodes: pods. The others count the ranks that share matrices, layers, sequences and experts."""

    nodes: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1


ALONE = Parallelism()
"""Of a session that does not say how its model is divided."""


Quantity = int | str


class SourceType(StrEnum):
    PERSISTENT_VOLUME_CLAIM = "PersistentVolumeClaim"
    HUB = "Hub"


class Engine(StrEnum):
    PEFT = "peft"
    NEMO_RL = "nemo-rl"


class Sampling(StrEnum):
    NONE = "None"
    COLOCATED = "Colocated"


class AccessMode(StrEnum):
    READ_WRITE_ONCE_POD = "ReadWriteOncePod"
    READ_WRITE_ONCE = "ReadWriteOnce"


class WhenDeleted(StrEnum):
    RETAIN = "Retain"
    DELETE = "Delete"


class ClaimSource(Resource):
    claim_name: str
    path: str = ""


class SecretKey(Resource):
    name: str
    key: str


class HubSource(Resource):
    repository: str
    revision: str = "main"
    token_secret_ref: SecretKey | None = None


class ModelSource(Resource):
    """Exactly the member that `type` names is there."""

    type: SourceType
    persistent_volume_claim: ClaimSource | None = None
    hub: HubSource | None = None


class Model(Resource):
    name: str
    source: ModelSource


class Adapters(Resource):
    """The CRD fills in another `max_rank`, which the API server keeps in every resource. This one is what the first
    CRD filled in: hashes leave it out, and with another here every worker that was made then would restart."""

    slots: int = 8
    max_rank: int = 64


class Resources(Resource):
    requests: dict[str, Quantity] = Field(default_factory=dict)
    limits: dict[str, Quantity] = Field(default_factory=dict)


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
        """Whether the claim goes with the session. A claim that somebody else made never does."""
        return self.retention_policy.when_deleted is WhenDeleted.DELETE and self.existing_claim is None


class PodOverrides(Resource):
    """What a user may say of the pod; each field goes into the pod as it is."""

    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: list[Manifest] = Field(default_factory=list)
    affinity: Manifest | None = None
    runtime_class_name: str | None = None
    scheduler_name: str | None = None
    priority_class_name: str | None = None
    service_account_name: str | None = None
    image_pull_secrets: list[Manifest] = Field(default_factory=list)
    image: str | None = None
    image_pull_policy: str | None = None
    env: list[Manifest] = Field(default_factory=list)
    termination_grace_period_seconds: int | None = None
    shared_memory: Quantity | None = None
    startup_timeout_seconds: int = 1800


class ServingSpec(Resource):
    """What is said of a process that serves a base model, whether it trains or only samples."""

    model: Model
    max_sequence_length: int | None = None
    resources: Resources = Resources()
    pod: PodOverrides = PodOverrides()


class TrainingSessionSpec(ServingSpec):
    engine: Engine = Engine.PEFT
    parallelism: Parallelism | None = None
    model_cache: ModelCache | None = None
    adapters: Adapters = Adapters()
    sampling: Sampling = Sampling.COLOCATED
    storage: Storage = Storage()
    suspend: bool = False

    @property
    def divided(self) -> Parallelism:
        return self.parallelism or ALONE

    @property
    def is_group(self) -> bool:
        """Whether it runs in several pods."""
        return self.divided.nodes > 1

    @property
    def is_converted_once(self) -> bool:
        """Whether a Job brings its model to where ranks look for it, for every later start: there is a place for it."""
        return self.engine is Engine.NEMO_RL and self.model_cache is not None

    @property
    def gpus_per_node(self) -> int:
        """0: it computes on the CPU. The CRD lets whole ones pass only."""
        return int(parse_quantity(self.resources.limits.get(GPU, 0))) if self.engine is Engine.NEMO_RL else 0

    @property
    def ranks_per_node(self) -> int:
        """Processes that hold a part of the model: one for each GPU; without GPUs those of one copy of the model."""
        return self.gpus_per_node or self.divided.tensor * self.divided.pipeline

    @property
    def ranks(self) -> int:
        return self.divided.nodes * self.ranks_per_node

    @property
    def uses_ray(self) -> bool:
        """Whether ranks are processes of their own: one rank on the CPU is the worker's process itself."""
        return self.engine is Engine.NEMO_RL and (self.gpus_per_node > 0 or self.ranks > 1)
