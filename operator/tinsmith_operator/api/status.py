"""The status of a TrainingSession or SamplerPool: what the operator has seen, never what it wants."""

from __future__ import annotations

from pydantic import Field

from tinsmith_operator.api.base import Resource, Time


class Condition(Resource):
    """One of `api.conditions.ConditionType`; its reason is an `api.reasons.Reason`."""

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: Time
    observed_generation: int | None = None  # others may leave it out


class AdapterUsage(Resource):
    used: int
    capacity: int
    summary: str


class CountedPod(Resource):
    """Up to where restarts have been counted, so that each is counted once whoever counts."""

    uid: str
    container_restarts: int = 0
    hung: bool = False


class Restarts(Resource):
    crash: int = 0
    out_of_memory: int = 0
    hang: int = 0
    counted: CountedPod | None = None


class GroupRun(Resource):
    """Which members belong to which run of the head: its pod's UID, and the restarts of its container before it."""

    head: str
    restarts: int = 0
    members: tuple[str, ...] = ()


class PoolRequests(Resource):
    """The latest request by annotation that is done with, as it was written."""

    restart: str | None = None


class Requests(PoolRequests):
    snapshot: str | None = None


class OwnerStatus(Resource):
    observed_generation: int | None = None
    conditions: tuple[Condition, ...] = ()
    certificate_expiry_time: Time | None = None

    def condition(self, type_: str) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == type_), None)


class TrainingSessionStatus(OwnerStatus):
    endpoint: str | None = None
    worker_id: str | None = None
    volume_size: str | None = None
    first_ready_time: Time | None = None
    epoch: int | None = None
    adapters: AdapterUsage | None = None
    restarts: Restarts = Field(default_factory=Restarts)
    last_snapshot_time: Time | None = None
    snapshot_seconds: int | None = None
    requests: Requests | None = None
    image: str | None = None
    image_digest: str | None = None
    node_name: str | None = None
    group: GroupRun | None = None


class SamplerPoolStatus(OwnerStatus):
    """The numbers are of replicas, and always there: autoscalers read them."""

    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    selector: str | None = None
    image: str | None = None
    requests: PoolRequests | None = None
