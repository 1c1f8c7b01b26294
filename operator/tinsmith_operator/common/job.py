"""A Job of a session's, read: how far it has come, and which pods are its tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.common.pod import Pod


@dataclass(frozen=True)
class Job:
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
        """If it holds."""
        conditions = (self.manifest.get("status") or {}).get("conditions") or ()
        return next((each for each in conditions if (each["type"], each["status"]) == (type_, "True")), None)


def read_job(manifest: Manifest, pods: Sequence[Pod]) -> Job:
    """pods: among which its own are."""
    uid = manifest["metadata"]["uid"]
    return Job(
        manifest,
        tuple(
            pod
            for pod in pods
            if any(owner["uid"] == uid for owner in pod.manifest["metadata"].get("ownerReferences", ()))
        ),
    )
