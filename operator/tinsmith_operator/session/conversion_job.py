"""The Job that converts a session's model, read; and whether the session's pods wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import CONVERSION_ANNOTATION
from tinsmith_operator.build.conversion import conversion_digest
from tinsmith_operator.build.worker import WorkerPlan
from tinsmith_operator.common.observed import Observed
from tinsmith_operator.common.ownership import OwnedObjects
from tinsmith_operator.common.pod import Pod


@dataclass(frozen=True)
class ConversionJob:
    """tries: a pod for each, the latest last."""

    manifest: Manifest
    tries: tuple[Pod, ...]

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def uid(self) -> str:
        return str(self.manifest["metadata"]["uid"])

    @property
    def is_terminating(self) -> bool:
        return "deletionTimestamp" in self.manifest["metadata"]

    @property
    def is_suspended(self) -> bool:
        return bool(self.manifest["spec"].get("suspend"))

    @property
    def is_complete(self) -> bool:
        return self._condition("Complete") is not None

    @property
    def failure(self) -> str | None:
        """Why it gave up, as its controller says it; None while it has not."""
        failed = self._condition("Failed")
        return str(failed.get("message", "")) if failed is not None else None

    @property
    def template(self) -> Manifest:
        template: Manifest = self.manifest["spec"]["template"]
        return template

    @property
    def result(self) -> str | None:
        """The digest of what decides it."""
        digest: str | None = self._annotations.get(CONVERSION_ANNOTATION)
        return digest

    @property
    def _annotations(self) -> Manifest:
        return self.manifest["metadata"].get("annotations") or {}

    def _condition(self, type_: str) -> Manifest | None:
        """If it holds."""
        conditions = (self.manifest.get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if (each["type"], each["status"]) == (type_, "True")), None)


def read_job(manifest: Manifest, converters: Sequence[Pod]) -> ConversionJob:
    uid = manifest["metadata"]["uid"]
    return ConversionJob(
        manifest,
        tuple(
            pod
            for pod in converters
            if any(owner["uid"] == uid for owner in pod.manifest["metadata"].get("ownerReferences", ()))
        ),
    )


def awaits_conversion(observed: Observed, owned: OwnedObjects, job: ConversionJob | None, plan: WorkerPlan) -> bool:
    """Whether the model must be converted before there are pods.

    Only before they start: what runs already is not stopped for it, since a worker converts what it does not find.
    """
    if not observed.session.spec.is_converted_once or plan.replicas == 0 or _has_pod(observed):
        return False
    if owned.workload is not None and owned.workload.wants_pods:
        return False
    return job is None or not (job.is_complete and job.result == conversion_digest(observed.session, plan))


def _has_pod(observed: Observed) -> bool:
    """One on its way out may be of an earlier session of that name, whose successor has not begun."""
    return observed.pod is not None and "deletionTimestamp" not in observed.pod["metadata"]
