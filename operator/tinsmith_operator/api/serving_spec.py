"""The common part of the specs of TrainingSessions and SamplerPools.

The CRDs define the bounds, the defaults and the descriptions. A test keeps the defaults in this module equal to the
defaults in the CRDs. The defaults here apply to objects that were stored before the CRD had a default for the field.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tinsmith_operator.api.base import Manifest, Resource

GPU = "nvidia.com/gpu"
"""The resource of whole GPUs."""

Quantity = int | str


class SourceType(StrEnum):
    PERSISTENT_VOLUME_CLAIM = "PersistentVolumeClaim"
    HUB = "Hub"


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
    """The location of a model. `type` names the field that is set; the other fields are None."""

    type: SourceType
    persistent_volume_claim: ClaimSource | None = None
    hub: HubSource | None = None


class Model(Resource):
    name: str
    source: ModelSource


class Resources(Resource):
    requests: dict[str, Quantity] = Field(default_factory=dict)
    limits: dict[str, Quantity] = Field(default_factory=dict)


class PodOverrides(Resource):
    """The pod fields that a user may set. The operator copies the user's fields into the pod unchanged."""

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


class IdlePolicy(Resource):
    """The policy for a session or pool without clients. Its times begin with the end of the last request."""

    suspend_after_seconds: int | None = None
    delete_after_seconds: int | None = None


class ServingSpec(Resource):
    """The spec of a process that serves a base model, for training or only for sampling."""

    model: Model
    max_sequence_length: int | None = None
    resources: Resources = Resources()
    pod: PodOverrides = PodOverrides()
    idle: IdlePolicy | None = None
    active_deadline_seconds: int | None = None

    @property
    def model_claims(self) -> dict[str, str]:
        """The claims that the pods mount for the model; the key is the spec field that names the claim."""
        claim = self.model.source.persistent_volume_claim
        return {"spec.model.source.persistentVolumeClaim.claimName": claim.claim_name} if claim is not None else {}
