"""The live StatefulSets, RayClusters, Deployments and Jobs of the operator, and their status."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_operator.api.base import LiveObject, Manifest
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.queue import is_held

STATEFUL_SET = "StatefulSet"
RAY_CLUSTER = "RayCluster"
WORKLOAD_KINDS = frozenset({STATEFUL_SET, RAY_CLUSTER})
"""The kinds of workloads that sessions have."""


def template_of(workload: Manifest) -> Manifest:
    """Return the template of the worker's pod, or of a pool's pods."""
    spec = workload["spec"]
    template: Manifest = spec["headGroupSpec"]["template"] if workload["kind"] == RAY_CLUSTER else spec["template"]
    return template


@dataclass(frozen=True)
class Workload(LiveObject):
    """A workload of the operator.

    If a workload has another owner, the operator knows only the metadata of the workload.
    """

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def template(self) -> Manifest:
        return template_of(self.manifest)

    @property
    def is_held(self) -> bool:
        """True if another manager, for example a queue, decides when the workload runs."""
        return self.kind == RAY_CLUSTER and is_held(self.manifest)

    @property
    def is_suspended(self) -> bool:
        """True if the workload is a RayCluster that is suspended, by any manager."""
        return bool(self.manifest["spec"].get("suspend", False))

    @property
    def wants_pods(self) -> bool:
        """True if the operator wants pods. Even if the operator wants pods, a queue may have suspended the workload."""
        spec = self.manifest["spec"]
        if self.kind == RAY_CLUSTER:
            return self.is_held or not self.is_suspended
        return bool(spec.get("replicas") != 0)

    @property
    def is_observed(self) -> bool:
        """True if the controller has seen this version of the workload.

        A controller that has not seen this version may still start a pod from the old template.

        KubeRay does not report which version of a RayCluster it has seen. If KubeRay starts a pod from an old template,
        the operator replaces this pod again.
        """
        if self.kind == RAY_CLUSTER:
            return True
        return bool(self._status.get("observedGeneration", 0) >= self.manifest["metadata"].get("generation", 0))

    @property
    def has_stopped(self) -> bool:
        """True if the controller knows that no pod may exist, and reports no pod."""
        if self.wants_pods:
            return False
        if self.kind == RAY_CLUSTER:
            # KubeRay removes this condition before it creates the next pod.
            return any(
                (condition["type"], condition["status"]) == ("RayClusterSuspended", "True")
                for condition in self._status.get("conditions") or ()
            )
        return self.is_observed and not self._status.get("replicas")

    @property
    def _status(self) -> Manifest:
        return self.manifest.get("status") or {}


@dataclass(frozen=True)
class Job(LiveObject):
    """A Job with the pods that the Job has started. The latest pod of the Job is last."""

    tries: tuple[Pod, ...]

    @property
    def is_suspended(self) -> bool:
        return bool(self.manifest["spec"].get("suspend"))

    @property
    def is_complete(self) -> bool:
        return self._condition("Complete") is not None

    @property
    def failure(self) -> str | None:
        """The reason that the Job controller gives for the failure, or None if the Job has not failed."""
        failed = self._condition("Failed")
        return str(failed.get("message", "")) if failed is not None else None

    @property
    def template(self) -> Manifest:
        template: Manifest = self.manifest["spec"]["template"]
        return template

    def annotation(self, name: str) -> str | None:
        text: str | None = (self.manifest["metadata"].get("annotations") or {}).get(name)
        return text

    def _condition(self, type_: str) -> Manifest | None:
        """Return the condition of this type if the status of the condition is True."""
        conditions = (self.manifest.get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if (each["type"], each["status"]) == (type_, "True")), None)


def read_job(manifest: Manifest, pods: Sequence[Pod]) -> Job:
    """Return the Job with the pods that the Job owns, in the order of `pods`."""
    uid = manifest["metadata"]["uid"]
    return Job(
        manifest,
        tuple(
            pod
            for pod in pods
            if any(owner["uid"] == uid for owner in pod.manifest["metadata"].get("ownerReferences", ()))
        ),
    )
