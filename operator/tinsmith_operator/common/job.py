"""The progress of a session's Job, and the pods of its tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_operator.api.base import LiveObject, Manifest
from tinsmith_operator.common.pod import Pod


@dataclass(frozen=True)
class Job(LiveObject):
    """A Job with the pods of its tries, the latest last."""

    tries: tuple[Pod, ...]

    @property
    def is_suspended(self) -> bool:
        return bool(self.manifest["spec"].get("suspend"))

    @property
    def is_complete(self) -> bool:
        return self._condition("Complete") is not None

    @property
    def failure(self) -> str | None:
        """The controller's reason for giving up; None while it has not."""
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
        """Return the condition of this type if its status is True."""
        conditions = (self.manifest.get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if (each["type"], each["status"]) == (type_, "True")), None)


def read_job(manifest: Manifest, pods: Sequence[Pod]) -> Job:
    """Return the Job with those of `pods` that it owns."""
    uid = manifest["metadata"]["uid"]
    return Job(
        manifest,
        tuple(
            pod
            for pod in pods
            if any(owner["uid"] == uid for owner in pod.manifest["metadata"].get("ownerReferences", ()))
        ),
    )
