"""Which image the worker runs.

What ran on one image is replayed on the same one, so the image is pinned on the claim, beside the journal: as it was
asked for, and, once known, by digest. Another image is pulled onto the worker's node first, while the old one runs. It
gets the volume only after the old one has stopped with a snapshot. If it finds that it has not, it refuses; the old
image then runs until it is ready, which means replayed, and the upgrade is tried once more.

Another default of the installation stops nobody: a worker goes on with its image until it is stopped for a reason of
its own, or has its turn to take the default. What the spec names is wanted at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.kubernetes_words import CREATION_EVENTS, why_not_admitted
from tinsmith_operator.api.names import (
    IMAGE_ANNOTATION,
    IMAGE_CHOICE_ANNOTATION,
    IMAGE_DIGEST_ANNOTATION,
    IMAGE_PULL_ANNOTATION,
    IMAGE_REFUSALS_ANNOTATION,
    IMAGE_REFUSED_ANNOTATION,
    PREVIOUS_IMAGE_ANNOTATION,
    PREVIOUS_IMAGE_DIGEST_ANNOTATION,
)
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.build.jobs import image_pull_digest
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.common.observed import KubernetesWarning, Observed
from tinsmith_operator.common.ownership import OwnedObjects
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.common.workloads import Job, Workload
from tinsmith_operator.installation import Installation
from tinsmith_operator.policy import Policy, repository_of
from tinsmith_operator.session.restart import calls_for_restart, change_of

MOST_REFUSALS = 2
"""By the second one the old image was ready, and stopped without a snapshot all the same: more tries change nothing."""


@dataclass(frozen=True)
class ImagePlan:
    """requested: what should run in the end. pulls_on: the node on which it is pulled, while the old image runs.
    stop_first: nothing may run until the worker's pod is gone.
    available: the installation's default, where another image goes on running until the next clean restart.
    """

    pins: Pins
    requested: str
    pulls_on: str | None = None
    stop_first: bool = False
    available: str | None = None

    @property
    def gave_up(self) -> bool:
        return self._falls_back and self.pins.refusals >= MOST_REFUSALS

    @property
    def replays_on_old_image(self) -> bool:
        return self._falls_back and not self.gave_up and not self.stop_first

    @property
    def _falls_back(self) -> bool:
        return self.pins.refused == self.requested != self.pins.image.reference


def plan_image(
    pins: Pins | None, observed: Observed, owned: OwnedObjects, installation: Installation, restart: str | None
) -> ImagePlan:
    """pins: of the claim that is there. restart: the latest request to start anew."""
    pod, named = owned.pod, observed.session.spec.pod.image
    if pins is None:
        return _first_plan(named, installation, pod)
    if (fallen_back := _after_refusal(pins, pod, installation)) is not None:
        return ImagePlan(fallen_back, named or installation.trainer_image)
    if named is None and _stays_on_image(pins, observed, owned, installation, restart):
        same = _arrived(_with_digest(pins, pod), pod)
        return ImagePlan(same, same.image.reference, available=installation.trainer_image)
    return _plan_for(named or installation.trainer_image, named is not None, pins, observed, owned)


def _first_plan(named: str | None, installation: Installation, pod: Pod | None) -> ImagePlan:
    """Nothing is pinned. If a worker runs all the same, somebody took the annotations away: its image stays."""
    running = pod.journal_image if pod is not None else None
    image = named or running or installation.trainer_image
    return ImagePlan(Pins(PinnedImage(image, None), named is not None), image)


def _plan_for(requested: str, by_session: bool, pins: Pins, observed: Observed, owned: OwnedObjects) -> ImagePlan:
    pod = owned.pod
    if pins.image.reference == requested:
        return ImagePlan(replace(_arrived(_with_digest(pins, pod), pod), by_session=by_session), requested)
    if pins.refused == requested and _must_run_on(pins, pod, owned.workload):
        return ImagePlan(_with_digest(pins, pod), requested)
    if not has_stopped(observed, owned):
        if (node := _node_to_pull_on(requested, pins, observed, owned)) is not None:
            return ImagePlan(_with_digest(pins, pod), requested, pulls_on=node)
        return ImagePlan(pins, requested, stop_first=True)
    again = pins.refused == requested
    return ImagePlan(
        Pins(
            image=PinnedImage(requested, None),
            by_session=by_session,
            previous=pins.image,
            refused=requested if again else None,
            refusals=pins.refusals if again else 0,
        ),
        requested,
    )


def _node_to_pull_on(requested: str, pins: Pins, observed: Observed, owned: OwnedObjects) -> str | None:
    """The worker's node, as long as it is to keep running until the image is there. A worker that does not serve has
    nothing to lose, and an image that refused the volume was pulled then. A node or quota without room for the Job's
    pod, as a node that is cordoned or not among those that the spec names now, says nothing about the image.
    """
    if observed.session.spec.suspend or observed.session.is_being_deleted or _is_being_stopped(owned.workload):
        return None
    pod, job = owned.pod, owned.image_pull
    is_ready = pod is not None and pod.is_ready
    if job is not None and not is_ready and (node := _node_that_cannot_fetch(requested, job)) is not None:
        return node
    if pod is None or pod.is_terminating or pod.node_name is None or pins.refused == requested:
        return None
    if job is None or job.annotation(IMAGE_PULL_ANNOTATION) != image_pull_digest(requested, pod.node_name):
        return pod.node_name if is_ready else None
    if job.is_complete or any(_has_run(each) for each in job.tries) or _has_no_room(job, observed.warnings):
        return None
    return pod.node_name if is_ready or pod.running_since is not None else None


def _node_that_cannot_fetch(requested: str, job: Job) -> str | None:
    """The node that has tried to pull this very image. A worker that crashes or is evicted meanwhile comes back on the
    old one."""
    nodes = (each.node_name for each in job.tries if each.cannot_pull and each.node_name is not None)
    wanted = job.annotation(IMAGE_PULL_ANNOTATION)
    return next((node for node in nodes if image_pull_digest(requested, node) == wanted), None)


def _has_run(puller: Pod) -> bool:
    """Return whether its own container has ended well. With the sidecar of a mesh, the pod and its Job never end."""
    return puller.latest_ending is not None and puller.latest_ending.exit_code == 0


def _has_no_room(job: Job, warnings: Sequence[KubernetesWarning]) -> bool:
    if job.tries:
        return any(each.is_unschedulable for each in job.tries)
    refused = (each.message for each in warnings if each.uid == job.uid and each.reason in CREATION_EVENTS)
    return any(why_not_admitted(message) in (Reason.QUOTA_EXCEEDED, Reason.RESOURCES_REFUSED) for message in refused)


def _stays_on_image(
    pins: Pins, observed: Observed, owned: OwnedObjects, installation: Installation, restart: str | None
) -> bool:
    """Whether only the installation's default is another one, and nothing stops the worker for a reason of its own.
    An upgrade that has begun, and was refused once, goes on.
    """
    if pins.by_session or installation.trainer_image in (pins.image.reference, pins.refused) or observed.has_turn:
        return False
    if observed.session.spec.suspend or _is_being_stopped(owned.workload) or _is_new(observed, pins):
        return False
    return not _restarts_anyway(pins, observed, owned, installation, restart)


def _is_new(observed: Observed, pins: Pins) -> bool:
    """A session that has not run yet, on a volume that another one left."""
    return observed.workload is None and observed.pod is None and observed.session.status.image != pins.image.reference


def _is_being_stopped(workload: Workload | None) -> bool:
    """Until it runs again."""
    return workload is not None and not workload.wants_pods


def _restarts_anyway(
    pins: Pins, observed: Observed, owned: OwnedObjects, installation: Installation, restart: str | None
) -> bool:
    """Because of what its user said: the spec, or that it shall start anew. Without a pod, the template of the next one
    says with what it would start; without that, the status says what has been answered.
    """
    template = owned.workload.template if owned.workload is not None else None
    live = owned.pod.manifest if owned.pod is not None else template
    if live is None or observed.claim is None:
        answered = observed.session.status.requests
        return restart is not None and (answered is None or answered.restart != restart)
    same = WorkerPlan(observed.claim["metadata"]["uid"], pins.image, 1, restart)
    change = change_of(live, observed.session, installation, same)
    return calls_for_restart(change, (), has_turn=observed.has_turn)


def has_stopped(observed: Observed, owned: OwnedObjects) -> bool:
    """No pod is there, and our StatefulSet or RayCluster, if there is one, has understood that there shall be none."""
    return observed.pod is None and (owned.workload is None or owned.workload.has_stopped)


def _after_refusal(pins: Pins, pod: Pod | None, installation: Installation) -> Pins | None:
    """The pins with the image that the journal needs in front, when the pinned one has just refused it."""
    ending = pod.latest_ending if pod is not None else None
    record = ending.record if ending is not None else None
    if pod is None or pod.is_ready or record is None or record.reason != "ImageChanged" or record.image is None:
        return None
    if record.image == pins.image.reference or not runs(pod, pins.image):
        return None
    if not _is_believed(record.image, pins, pod, installation.policy):
        return None
    known = pins.previous if pins.previous is not None and pins.previous.reference == record.image else None
    again = pins.refused == pins.image.reference
    return Pins(
        image=known or PinnedImage(record.image, None),
        by_session=pins.by_session,
        refused=pins.image.reference,
        refusals=pins.refusals + 1 if again else 1,
    )


def _is_believed(image: str, pins: Pins, pod: Pod, policy: Policy) -> bool:
    """Whatever runs in the pod says it, and could say anything: what it names is pulled, and shown in the status."""
    is_known = pins.previous is not None and pins.previous.reference == image
    return is_known or policy.vouches_for(image) or (pod.is_vouched_for and policy.allows_image(image))


def runs(pod: Pod, image: PinnedImage) -> bool:
    """By the worker's arguments. Pods ask for an image as somebody wrote it, later by digest, and behind a webhook
    for mirrors by another name."""
    return pod.journal_image == image.reference


def _must_run_on(pins: Pins, pod: Pod | None, workload: Workload | None) -> bool:
    """Whether the old image has still to replay, or stays for good. Once it is being stopped, it has replayed."""
    if pins.refusals >= MOST_REFUSALS:
        return True
    return not _is_being_stopped(workload) and not (pod is not None and runs(pod, pins.image) and pod.is_ready)


def _arrived(pins: Pins, pod: Pod | None) -> Pins:
    """Once it is ready the journal is this image's, and what came before is history."""
    return Pins(pins.image, pins.by_session) if pod is not None and pod.is_ready and runs(pod, pins.image) else pins


def _with_digest(pins: Pins, pod: Pod | None) -> Pins:
    """With what the tag meant when it first ran. A digest of another repository cannot be pulled and is no pin."""
    if pins.image.digest is not None or pod is None or pod.image != pins.image.reference or pod.image_id is None:
        return pins
    repository, _, digest = pod.image_id.partition("@")
    if not digest.startswith("sha256:") or repository != repository_of(pins.image.reference):
        return pins
    return replace(pins, image=PinnedImage(pins.image.reference, pod.image_id))


CHOSEN_BY_SESSION = "session"


@dataclass(frozen=True)
class Pins:
    """The annotations of the claim. by_session: the spec named the image; else it was the installation's default."""

    image: PinnedImage
    by_session: bool = False
    previous: PinnedImage | None = None
    refused: str | None = None
    refusals: int = 0

    def annotations(self) -> dict[str, str]:
        said = {
            IMAGE_ANNOTATION: self.image.reference,
            IMAGE_DIGEST_ANNOTATION: self.image.digest,
            IMAGE_CHOICE_ANNOTATION: CHOSEN_BY_SESSION if self.by_session else None,
            PREVIOUS_IMAGE_ANNOTATION: self.previous and self.previous.reference,
            PREVIOUS_IMAGE_DIGEST_ANNOTATION: self.previous and self.previous.digest,
            IMAGE_REFUSED_ANNOTATION: self.refused,
            IMAGE_REFUSALS_ANNOTATION: str(self.refusals) if self.refusals else None,
        }
        return {name: value for name, value in said.items() if value}


PIN_ANNOTATIONS = frozenset(
    {
        IMAGE_ANNOTATION,
        IMAGE_DIGEST_ANNOTATION,
        IMAGE_CHOICE_ANNOTATION,
        PREVIOUS_IMAGE_ANNOTATION,
        PREVIOUS_IMAGE_DIGEST_ANNOTATION,
        IMAGE_REFUSED_ANNOTATION,
        IMAGE_REFUSALS_ANNOTATION,
    }
)


def read_pins(claim: Manifest | None) -> Pins | None:
    """None when nothing has run on this volume yet."""
    said = (claim["metadata"].get("annotations") or {}) if claim is not None else {}
    if IMAGE_ANNOTATION not in said:
        return None
    previous = said.get(PREVIOUS_IMAGE_ANNOTATION)
    return Pins(
        image=PinnedImage(said[IMAGE_ANNOTATION], said.get(IMAGE_DIGEST_ANNOTATION)),
        by_session=said.get(IMAGE_CHOICE_ANNOTATION) == CHOSEN_BY_SESSION,
        previous=PinnedImage(previous, said.get(PREVIOUS_IMAGE_DIGEST_ANNOTATION)) if previous else None,
        refused=said.get(IMAGE_REFUSED_ANNOTATION),
        refusals=_count(said.get(IMAGE_REFUSALS_ANNOTATION)),
    )


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
