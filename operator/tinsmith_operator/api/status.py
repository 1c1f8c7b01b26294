"""The status of the resources that the operator reconciles. A status contains only observed state.

The copy of a template in a session's status is observed, too: it is what the template said when the session began.
"""

from __future__ import annotations

from pydantic import Field

from tinsmith_operator.api.base import Resource, Time


class Condition(Resource):
    """A condition.

    - `type`: an `api.conditions.ConditionType`.
    - `reason`: an `api.reasons.Reason`.
    """

    type: str
    status: str
    reason: str
    message: str
    last_transition_time: Time
    observed_generation: int | None = None  # other clients may omit it


class TemplateCopy(Resource):
    """The copy of a SessionTemplate by which a session runs.

    `spec` is the JSON text of the fields of the session's spec that the template set.
    """

    name: str
    generation: int
    spec: str


class AdapterUsage(Resource):
    used: int
    capacity: int
    summary: str


class CountedPod(Resource):
    """The already counted restarts of a pod.

    Because the status records the counted restarts, every restart is counted once, even if another operator takes over.
    """

    uid: str
    container_restarts: int = 0
    hung: bool = False


class Restarts(Resource):
    crash: int = 0
    out_of_memory: int = 0
    hang: int = 0
    counted: CountedPod | None = None


class GroupRun(Resource):
    """A run of a group: the head's pod and its restart count, and the members.

    `head` and `members` are UIDs of pods.
    """

    head: str
    restarts: int = 0
    members: tuple[str, ...] = ()


class PoolRequests(Resource):
    """The time in the latest request that has been carried out, for each annotation, as the user wrote it."""

    restart: str | None = None


class Requests(PoolRequests):
    snapshot: str | None = None


class IdleState(Resource):
    """The idleness of a session or pool.

    - `since`: since when no client has used it.
    - `suspended_time`: when the operator suspended it; None while it is awake.
    - `wake_request`: the latest wake request that was carried out.
    - `suspended_seconds`: the total length of the earlier suspensions.
    """

    since: Time | None = None
    suspended_time: Time | None = None
    wake_request: str | None = None
    suspended_seconds: int = 0


class ReconciledStatus(Resource):
    observed_generation: int | None = None
    conditions: tuple[Condition, ...] = ()

    def condition(self, type_: str) -> Condition | None:
        return next((condition for condition in self.conditions if condition.type == type_), None)


class OwnerStatus(ReconciledStatus):
    certificate_expiry_time: Time | None = None
    idle: IdleState | None = None


class TrainingSessionStatus(OwnerStatus):
    model: str | None = None
    engine: str | None = None
    template: TemplateCopy | None = None
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


class RunProgress(Resource):
    model: str
    step: int


class TrainingProgress(Resource):
    """The progress of a session's models in `status.progress`, which is written apart from the other status.

    - `models`: the number of models that the worker holds.
    - `step`: the largest number of optimizer steps of a model; None without a model.
    - `tokens_per_second`: the tokens trained between the two latest reports; None until there are two.
    - `runs`: some models with their steps.
    """

    models: int
    step: int | None = None
    tokens_per_second: int | None = None
    last_activity_time: Time | None = None
    runs: tuple[RunProgress, ...] = ()


class SessionTemplateStatus(ReconciledStatus):
    """The status of a template.

    - `sessions`: the sessions that an API server or the operator has created from the template.
    - `ready_warm`: the number of warm sessions that are ready.
    - `stale`: the number of sessions with a copy of another spec.
    - `warm_sessions`: the names of the warm sessions, which hold no models.
    """

    sessions: int = 0
    summary: str | None = None
    ready_warm: int = 0
    stale: int = 0
    warm_sessions: tuple[str, ...] = ()


class SamplerPoolStatus(OwnerStatus):
    """The status of a pool. The replica counts always have a value, because autoscalers read replica counts."""

    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    selector: str | None = None
    image: str | None = None
    requests: PoolRequests | None = None
