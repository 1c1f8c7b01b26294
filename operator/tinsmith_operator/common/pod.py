"""The state of a pod.

The state includes what the pod's status says about the node, because the operator may not read nodes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from tinsmith_operator.api.base import LiveObject, Manifest, parse_time
from tinsmith_operator.api.kubernetes_words import IMAGES
from tinsmith_operator.api.names import (
    IMAGE_ANNOTATION,
    RESTART_REQUEST_ANNOTATION,
    WORKER_CONTAINER,
)
from tinsmith_operator.common.redaction import redacted_line
from tinsmith_operator.policy import Policy

OVERDUE_AFTER = timedelta(seconds=60)
"""How long after its grace period a deleted pod counts as lost.

A running kubelet ends a pod within seconds.
"""


@dataclass(frozen=True)
class TerminationRecord:
    """The record of a worker that refused to start.

    For ImageChanged, `image` is the image that can replay the journal.
    """

    reason: str
    image: str | None


@dataclass(frozen=True)
class Ending:
    """The end of a run of the worker's container.

    `last_words` is the termination message of the container, redacted. `last_words` is None if the container left no
    message, or if the message may not be quoted.
    """

    exit_code: int
    out_of_memory: bool
    record: TerminationRecord | None
    last_words: str | None


@dataclass(frozen=True)
class Pod(LiveObject):
    """A pod, with the state that the pod's containers, conditions and annotations show.

    If `is_vouched_for` is true, the platform team trusts the pod's image. Messages from images that the platform team
    does not trust are never quoted.
    """

    is_vouched_for: bool = False

    @property
    def restart_request(self) -> str | None:
        """The restart request that this pod carried out."""
        request: str | None = self._annotations.get(RESTART_REQUEST_ANNOTATION)
        return request

    @property
    def deletion_time(self) -> datetime | None:
        """The time by which a deleted pod should be gone: the deletion and the grace period."""
        return parse_time(self.manifest["metadata"].get("deletionTimestamp"))

    @property
    def has_ended(self) -> bool:
        """True if the pod has ended permanently, for example by an eviction.

        No container of an ended pod starts again.
        """
        return self.manifest.get("status", {}).get("phase") in {"Failed", "Succeeded"}

    @property
    def has_failed(self) -> bool:
        """True if the pod has ended permanently with a failure."""
        return bool(self.manifest.get("status", {}).get("phase") == "Failed")

    @property
    def node_name(self) -> str | None:
        name: str | None = self.manifest.get("spec", {}).get("nodeName")
        return name

    @property
    def image(self) -> str | None:
        """The image in the pod's spec. A webhook may have replaced the requested image by the image of a mirror."""
        image: str | None = self._container_spec.get("image")
        return image

    @property
    def journal_image(self) -> str | None:
        """The image in the worker's arguments. The worker writes the name of this image into its journal.

        A mirror does not change the name of the image in the arguments.
        """
        arguments = self._container_spec.get("args") or ()
        return next((each.removeprefix("--image=") for each in arguments if each.startswith("--image=")), None)

    @property
    def requested_image(self) -> str | None:
        """The image that the spec or the installation named, if the pod records this image.

        If the pod does not record a requested image, the image in the pod's spec.
        """
        noted: str | None = self._annotations.get(IMAGE_ANNOTATION)
        return noted or self.journal_image or self.image

    @property
    def image_id(self) -> str | None:
        """The node's name for the image: repository@digest, or an ID if the image did not come from a registry."""
        found = str(self._container.get("imageID", "")).removeprefix("docker-pullable://")
        return found or None

    @property
    def is_ready(self) -> bool:
        return self.condition("Ready").get("status") == "True" and not self.is_terminating

    @property
    def ready_since(self) -> datetime | None:
        return parse_time(self.condition("Ready").get("lastTransitionTime")) if self.is_ready else None

    @property
    def restarts(self) -> int:
        return int(self._container.get("restartCount", 0))

    @property
    def waiting(self) -> Manifest | None:
        """The reason and message of a container that is waiting."""
        return self._state.get("waiting")

    @property
    def cannot_pull(self) -> bool:
        """True if the image cannot be pulled. No container of the pod runs, and only a restart can help."""
        return (self.waiting or {}).get("reason") in IMAGES

    @property
    def running_since(self) -> datetime | None:
        return parse_time((self._state.get("running") or {}).get("startedAt"))

    @property
    def status_reason(self) -> str:
        """The kubelet's reason for the failure, or an empty text if the pod's own containers failed."""
        return str(self.manifest.get("status", {}).get("reason") or "")

    @property
    def status_message(self) -> str:
        return str(self.manifest.get("status", {}).get("message") or "")

    @property
    def disruption(self) -> str:
        """The reason of the condition DisruptionTarget, or an empty text if the pod does not have this condition."""
        target = self.condition("DisruptionTarget")
        return str(target.get("reason", "")) if target.get("status") == "True" else ""

    @property
    def is_unschedulable(self) -> bool:
        """True if the scheduler finds no node for the pod."""
        return self.node_name is None and self.condition("PodScheduled").get("reason") == "Unschedulable"

    @property
    def scheduling_gates(self) -> tuple[str, ...]:
        return tuple(str(gate["name"]) for gate in self.manifest.get("spec", {}).get("schedulingGates") or ())

    @property
    def created_at(self) -> datetime | None:
        return parse_time(self.manifest["metadata"].get("creationTimestamp"))

    @property
    def has_started(self) -> bool:
        """True if the pod's container has run, which means that its volumes were mounted."""
        return self.running_since is not None or self.latest_ending is not None

    @cached_property
    def latest_ending(self) -> Ending | None:
        terminated = self._state.get("terminated") or (self._container.get("lastState") or {}).get("terminated")
        if not terminated:
            return None
        record, words = parse_record(terminated.get("message"))
        return Ending(
            exit_code=int(terminated.get("exitCode", 0)),
            out_of_memory=terminated.get("reason") == "OOMKilled",
            record=record,
            last_words=redacted_line(words) if words and self.is_vouched_for else None,
        )

    def condition(self, type_: str) -> Manifest:
        """Return the condition of this type, or an empty dictionary if the pod does not have such a condition."""
        conditions = self.manifest.get("status", {}).get("conditions") or ()
        return next((condition for condition in conditions if condition["type"] == type_), {})

    @property
    def _annotations(self) -> Manifest:
        return self.manifest["metadata"].get("annotations") or {}

    @cached_property
    def _container_spec(self) -> Manifest:
        containers = self.manifest.get("spec", {}).get("containers", ())
        return next((each for each in containers if each["name"] == WORKER_CONTAINER), {})

    @cached_property
    def _container(self) -> Manifest:
        statuses = self.manifest.get("status", {}).get("containerStatuses") or ()
        return next((status for status in statuses if status["name"] == WORKER_CONTAINER), {})

    @property
    def _state(self) -> Manifest:
        return self._container.get("state") or {}


def read_pod(manifest: Manifest, policy: Policy) -> Pod:
    """Return the pod. Messages of the pod may be quoted only if the policy trusts the pod's image."""
    pod = Pod(manifest)
    return replace(pod, is_vouched_for=pod.requested_image is not None and policy.vouches_for(pod.requested_image))


def parse_record(message: Any) -> tuple[TerminationRecord | None, str]:
    """Return the record in a termination message, and the text.

    If the message contains no record, the text is the whole message.
    """
    text = str(message or "")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        # A message of 4096 bytes can contain lists that nest deeper than the parser allows.
        return None, text
    if not isinstance(record, dict):
        return None, text
    reason, words, image = record.get("reason"), record.get("message", ""), record.get("image")
    if not isinstance(reason, str) or not isinstance(words, str):
        return None, text
    return TerminationRecord(reason, image if isinstance(image, str) else None), words


def node_is_silent(pod: Pod, now: datetime) -> bool:
    return _was_marked_by_node_controller(pod) or is_overdue(pod, now)


def _was_marked_by_node_controller(pod: Pod) -> bool:
    """Return whether the condition Ready is False although the condition ContainersReady is True.

    The node controller changes only the condition Ready, but a kubelet changes both conditions.
    """
    return pod.condition("Ready").get("status") == "False" and pod.condition("ContainersReady").get("status") == "True"


def is_overdue(pod: Pod, now: datetime) -> bool:
    return pod.deletion_time is not None and now > overdue_time(pod.deletion_time)


def overdue_time(deletion_time: datetime) -> datetime:
    return deletion_time + OVERDUE_AFTER
