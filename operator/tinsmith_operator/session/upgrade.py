"""The image of a worker, and its upgrades.

Only the image that wrote a journal can replay it. So annotations of the claim pin the image by its requested name and,
when the digest is known, by its digest. A new image is first pulled onto the worker's node, while the old image still
runs. The new image gets the volume only after the old image has stopped with a snapshot. Without a snapshot, the new
image refuses the volume. After a refusal, the old image runs until it has replayed the journal, and the upgrade is
tried once more.

A new default image of the installation does not stop any worker. The worker keeps its image until the worker is stopped
for another reason, or until the session's turn of an automatic restart. If the spec names an image, the upgrade to this
image starts immediately.
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
"""The number of refusals after which the upgrade is given up.

A second refusal means that the old image was ready but stopped without a snapshot, so further attempts would fail too.
"""


@dataclass(frozen=True)
class ImagePlan:
    """The image to run now, and the image to run after the upgrade.

    - `requested`: the image to run after the upgrade.
    - `pulls_on`: the node that pulls the requested image while the old image runs.
    - `stop_first`: no worker may run until the present pod is gone.
    - `available`: the installation's default image, if the worker keeps another image until the next restart.
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
    """Return the plan.

    - `pins`: the pins of the present claim.
    - `restart`: the latest request for a restart.
    """
    pod, named = owned.pod, observed.session.spec.pod.image
    if pins is None:
        return _first_plan(named, observed, installation, pod)
    if (fallen_back := _after_refusal(pins, pod, installation)) is not None:
        return ImagePlan(fallen_back, named or installation.trainer_image)
    if named is None and _stays_on_image(pins, observed, owned, installation, restart):
        same = _arrived(_with_digest(pins, pod), pod)
        return ImagePlan(same, same.image.reference, available=installation.trainer_image)
    return _plan_for(named or installation.trainer_image, named is not None, pins, observed, owned)


def _first_plan(named: str | None, observed: Observed, installation: Installation, pod: Pod | None) -> ImagePlan:
    """Return the plan for a claim without pins.

    A running worker keeps its image: if its claim has no pins, a user has removed the annotations.

    The default image has the digest that other workers of the namespace run, unless each start should pull the tag.
    """
    running = pod.journal_image if pod is not None else None
    image = named or running or installation.trainer_image
    policy = observed.session.spec.pod.image_pull_policy or installation.trainer_image_pull_policy
    is_shared = pod is None and named is None and policy != "Always"
    digest = observed.default_image_digest if is_shared and not _names_digest(image) else None
    return ImagePlan(Pins(PinnedImage(image, digest), named is not None), image)


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
    """Return the worker's node if the worker must run until this node has pulled the image.

    A worker that does not serve is stopped immediately. An image that has refused the volume before was already pulled.
    If the Job's pod finds no room on the node or in the quota, the worker is stopped immediately, because the image may
    be usable.
    """
    if observed.session.is_suspended or observed.session.is_being_deleted or _is_being_stopped(owned.workload):
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
    """Return the node that the status names as unable to pull this image.

    A worker that crashes or is evicted before the image is pulled starts again with the old image.
    """
    nodes = (each.node_name for each in job.tries if each.cannot_pull and each.node_name is not None)
    digest = job.annotation(IMAGE_PULL_ANNOTATION)
    return next((node for node in nodes if image_pull_digest(requested, node) == digest), None)


def _has_run(puller: Pod) -> bool:
    """Return whether the pod's own container has succeeded.

    A pod with the sidecar of a service mesh never ends, even after its own container has succeeded.
    """
    return puller.latest_ending is not None and puller.latest_ending.exit_code == 0


def _has_no_room(job: Job, warnings: Sequence[KubernetesWarning]) -> bool:
    if job.tries:
        return any(each.is_unschedulable for each in job.tries)
    refused = (each.message for each in warnings if each.uid == job.uid and each.reason in CREATION_EVENTS)
    return any(why_not_admitted(message) in (Reason.QUOTA_EXCEEDED, Reason.RESOURCES_REFUSED) for message in refused)


def _stays_on_image(
    pins: Pins, observed: Observed, owned: OwnedObjects, installation: Installation, restart: str | None
) -> bool:
    """Return whether only the installation's default image has changed, and nothing else stops the worker.

    An upgrade that was refused once is continued.
    """
    if pins.by_session or installation.trainer_image in (pins.image.reference, pins.refused) or observed.has_turn:
        return False
    if observed.session.is_suspended or _is_being_stopped(owned.workload) or _is_new(observed, pins):
        return False
    return not _restarts_anyway(pins, observed, owned, installation, restart)


def _is_new(observed: Observed, pins: Pins) -> bool:
    """Return whether the session has the volume of an earlier session and has not run yet."""
    return observed.workload is None and observed.pod is None and observed.session.status.image != pins.image.reference


def _is_being_stopped(workload: Workload | None) -> bool:
    return workload is not None and not workload.wants_pods


def _restarts_anyway(
    pins: Pins, observed: Observed, owned: OwnedObjects, installation: Installation, restart: str | None
) -> bool:
    """Return whether the worker restarts in any case: the spec has changed, or a user requested a restart.

    Without a pod, the template of the next pod is compared. Without a template, the restart request that the status
    records as completed is compared.
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
    """Return whether no pod exists, and the workload's controller knows that it must not create a pod."""
    return observed.pod is None and (owned.workload is None or owned.workload.has_stopped)


def _after_refusal(pins: Pins, pod: Pod | None, installation: Installation) -> Pins | None:
    """Return the pins with the image that the journal needs, if the pinned image has just refused this journal."""
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
    """Return whether the image that the pod reports can be trusted.

    The operator pulls a trusted image, and shows the name of the image in the status.
    """
    is_known = pins.previous is not None and pins.previous.reference == image
    return is_known or policy.vouches_for(image) or (pod.is_vouched_for and policy.allows_image(image))


def runs(pod: Pod, image: PinnedImage) -> bool:
    """Return whether the pod runs this image, according to the worker's arguments.

    The image in the pod's spec may be a digest or a mirror.
    """
    return pod.journal_image == image.reference


def _must_run_on(pins: Pins, pod: Pod | None, workload: Workload | None) -> bool:
    """Return whether the worker must stay on the old image: the replay is not complete, or the upgrade was given up.

    A worker that is stopping has already completed the replay.
    """
    if pins.refusals >= MOST_REFUSALS:
        return True
    return not _is_being_stopped(workload) and not (pod is not None and runs(pod, pins.image) and pod.is_ready)


def _arrived(pins: Pins, pod: Pod | None) -> Pins:
    """Return the pins. A pinned image that is ready has taken over the journal, so earlier images are left out."""
    return Pins(pins.image, pins.by_session) if pod is not None and pod.is_ready and runs(pod, pins.image) else pins


def _with_digest(pins: Pins, pod: Pod | None) -> Pins:
    """Return the pins, with the digest of the image at the first run.

    A mirror's digest is not recorded, because other registries do not have this digest.
    """
    image = pins.image
    if image.digest is not None or _names_digest(image.reference):
        return pins
    if pod is None or pod.image != image.reference or pod.image_id is None:
        return pins
    repository, _, digest = pod.image_id.partition("@")
    if not digest.startswith("sha256:") or repository != repository_of(image.reference):
        return pins
    return replace(pins, image=PinnedImage(image.reference, pod.image_id))


def _names_digest(image: str) -> bool:
    """Return whether the name of the image contains its digest. Such an image cannot change."""
    return "@sha256:" in image


CHOSEN_BY_SESSION = "session"


@dataclass(frozen=True)
class Pins:
    """The images that a volume records, in the annotations of its claim.

    If `by_session` is true, the session's spec named the image. If `by_session` is false, the image was the
    installation's default.
    """

    image: PinnedImage
    by_session: bool = False
    previous: PinnedImage | None = None
    refused: str | None = None
    refusals: int = 0

    def annotations(self) -> dict[str, str]:
        annotations = {
            IMAGE_ANNOTATION: self.image.reference,
            IMAGE_DIGEST_ANNOTATION: self.image.digest,
            IMAGE_CHOICE_ANNOTATION: CHOSEN_BY_SESSION if self.by_session else None,
            PREVIOUS_IMAGE_ANNOTATION: self.previous and self.previous.reference,
            PREVIOUS_IMAGE_DIGEST_ANNOTATION: self.previous and self.previous.digest,
            IMAGE_REFUSED_ANNOTATION: self.refused,
            IMAGE_REFUSALS_ANNOTATION: str(self.refusals) if self.refusals else None,
        }
        return {name: value for name, value in annotations.items() if value}


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
    """Return the pins, or None if no worker has run on this volume."""
    annotations = (claim["metadata"].get("annotations") or {}) if claim is not None else {}
    if IMAGE_ANNOTATION not in annotations:
        return None
    previous = annotations.get(PREVIOUS_IMAGE_ANNOTATION)
    return Pins(
        image=PinnedImage(annotations[IMAGE_ANNOTATION], annotations.get(IMAGE_DIGEST_ANNOTATION)),
        by_session=annotations.get(IMAGE_CHOICE_ANNOTATION) == CHOSEN_BY_SESSION,
        previous=PinnedImage(previous, annotations.get(PREVIOUS_IMAGE_DIGEST_ANNOTATION)) if previous else None,
        refused=annotations.get(IMAGE_REFUSED_ANNOTATION),
        refusals=_count(annotations.get(IMAGE_REFUSALS_ANNOTATION)),
    )


def _count(text: str | None) -> int:
    return int(text) if text and text.isdecimal() else 0
