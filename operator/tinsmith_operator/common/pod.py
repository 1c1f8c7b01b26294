"""A pod's status, read; and whether its node has gone silent, by that status: the operator may not read nodes."""

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
"""Beyond its grace period: a kubelet that is there ends a pod within seconds of it."""


@dataclass(frozen=True)
class TerminationRecord:
    """What a worker left behind that refused to start. image: of ImageChanged, the one that can replay the journal."""

    reason: str
    image: str | None


@dataclass(frozen=True)
class Ending:
    """How a run of the worker's container ended.

    last_words: the container's own words, redacted; None where it left none, or where they may not be quoted.
    """

    exit_code: int
    out_of_memory: bool
    record: TerminationRecord | None
    last_words: str | None


@dataclass(frozen=True)
class Pod(LiveObject):
    """A pod with what its containers, conditions and annotations say.

    is_vouched_for: whether the platform vouches for its image. The words of every other image are quoted nowhere.
    """

    is_vouched_for: bool = False

    @property
    def restart_request(self) -> str | None:
        """With which it was started."""
        request: str | None = self._annotations.get(RESTART_REQUEST_ANNOTATION)
        return request

    @property
    def deletion_time(self) -> datetime | None:
        """When it should be gone: the API server adds the grace period."""
        return parse_time(self.manifest["metadata"].get("deletionTimestamp"))

    @property
    def has_ended(self) -> bool:
        """For good, as when it was evicted: no container of it is started again."""
        return self.manifest.get("status", {}).get("phase") in {"Failed", "Succeeded"}

    @property
    def has_failed(self) -> bool:
        """For good, and not as it should."""
        return bool(self.manifest.get("status", {}).get("phase") == "Failed")

    @property
    def node_name(self) -> str | None:
        name: str | None = self.manifest.get("spec", {}).get("nodeName")
        return name

    @property
    def image(self) -> str | None:
        """As the pod asks for it: a webhook may have put a mirror in place of what the session asked for."""
        image: str | None = self._wanted.get("image")
        return image

    @property
    def journal_image(self) -> str | None:
        """By the worker's arguments, which it writes into its journal: what the session asked for, on any mirror."""
        arguments = self._wanted.get("args") or ()
        return next((each.removeprefix("--image=") for each in arguments if each.startswith("--image=")), None)

    @property
    def asked_image(self) -> str | None:
        """As the spec or the installation named it, where the operator noted that in the pod; else as the pod asks."""
        noted: str | None = self._annotations.get(IMAGE_ANNOTATION)
        return noted or self.journal_image or self.image

    @property
    def image_id(self) -> str | None:
        """As the node found it: repository@digest, or an id where the image came from no registry."""
        found = str(self._container.get("imageID", "")).removeprefix("docker-pullable://")
        return found or None

    @property
    def is_ready(self) -> bool:
        return self.condition("Ready").get("status") == "True" and not self.is_terminating

    @property
    def restarts(self) -> int:
        return int(self._container.get("restartCount", 0))

    @property
    def waiting(self) -> Manifest | None:
        """Why the container does not run: reason and message."""
        return self._state.get("waiting")

    @property
    def cannot_pull(self) -> bool:
        """Whether its image cannot be pulled: nothing runs in it, and a change of how to pull does not reach it."""
        return (self.waiting or {}).get("reason") in IMAGES

    @property
    def running_since(self) -> datetime | None:
        return parse_time((self._state.get("running") or {}).get("startedAt"))

    @property
    def status_reason(self) -> str:
        """The node's word for the failure; empty where the pod's own containers ended it."""
        return str(self.manifest.get("status", {}).get("reason") or "")

    @property
    def status_message(self) -> str:
        return str(self.manifest.get("status", {}).get("message") or "")

    @property
    def disruption(self) -> str:
        """The word for its removal from outside; empty where none is given."""
        target = self.condition("DisruptionTarget")
        return str(target.get("reason", "")) if target.get("status") == "True" else ""

    @property
    def is_unschedulable(self) -> bool:
        """Return whether the scheduler finds no node for it."""
        return self.node_name is None and self.condition("PodScheduled").get("reason") == "Unschedulable"

    @property
    def scheduling_gates(self) -> tuple[str, ...]:
        return tuple(str(gate["name"]) for gate in self.manifest.get("spec", {}).get("schedulingGates") or ())

    @property
    def created_at(self) -> datetime | None:
        return parse_time(self.manifest["metadata"].get("creationTimestamp"))

    @property
    def has_started(self) -> bool:
        """Whether its container has run, so that its volumes are mounted."""
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
        """Empty when it is not there."""
        conditions = self.manifest.get("status", {}).get("conditions") or ()
        return next((condition for condition in conditions if condition["type"] == type_), {})

    @property
    def _annotations(self) -> Manifest:
        return self.manifest["metadata"].get("annotations") or {}

    @cached_property
    def _wanted(self) -> Manifest:
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
    """Return the pod; its words may be quoted if the policy vouches for its image."""
    pod = Pod(manifest)
    return replace(pod, is_vouched_for=pod.asked_image is not None and policy.vouches_for(pod.asked_image))


def parse_record(message: Any) -> tuple[TerminationRecord | None, str]:
    """Return the record in a termination message, and its words; without a record, the words are the message."""
    text = str(message or "")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        # 4096 bytes are enough to nest lists deeper than the parser goes.
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
    """It sets Ready to False and touches nothing else; a kubelet moves both conditions together."""
    return pod.condition("Ready").get("status") == "False" and pod.condition("ContainersReady").get("status") == "True"


def is_overdue(pod: Pod, now: datetime) -> bool:
    return pod.deletion_time is not None and now > overdue_time(pod.deletion_time)


def overdue_time(deletion_time: datetime) -> datetime:
    return deletion_time + OVERDUE_AFTER
