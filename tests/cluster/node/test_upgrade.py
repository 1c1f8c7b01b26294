"""A new image for a worker at work: what ran on the old one is replayed on no other, and no step is lost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.node.conftest import SESSION, Run
from support.client.pipelined_program import Ending
from support.kubernetes.installation import Installation, wait_for
from testcluster.kubernetes.containerd import LoadedImage
from testcluster.programs.archives import write_variant
from testcluster.project_images import build_images

POD, CLAIM = f"{SESSION}-0", f"{SESSION}-journal"
REPOSITORY = "tinsmith.local/tinsmith/trainer"


@pytest.fixture(scope="module", autouse=True)
def back_on_the_image_of_the_chart(installation: Installation) -> Iterator[None]:
    """Afterwards."""
    yield
    installation.patch("trainingsession", SESSION, {"spec": {"pod": {"image": None}}})
    wait_upgraded(installation, f"{REPOSITORY}:0.1.0")


@pytest.fixture
def next_image(installation: Installation, session: str, tmp_path: Path) -> LoadedImage:
    """Return an image that has never run: the trainer's, under a digest of its own."""
    return load_variant(installation, f"{REPOSITORY}:next-{uuid.uuid4().hex[:8]}", tmp_path)


def test_the_old_image_ends_with_a_snapshot_before_the_new_one_starts(
    installation: Installation, next_image: LoadedImage, run: Run, undisturbed: Ending
) -> None:
    def upgrade() -> None:
        ask_for(installation, next_image)
        wait_upgraded(installation, next_image.name)

    before = replays(installation)
    ending = run(upgrade)
    assert ending.ran_each_step_once()
    assert ending == undisturbed
    assert replays(installation) == before


def test_an_image_that_no_node_can_pull_leaves_the_worker_running_until_it_is_reverted(
    installation: Installation, session: str
) -> None:
    def worker() -> str:
        return (installation.get("pod", POD) or {})["metadata"]["uid"]

    before, job = worker(), f"{SESSION}-image-pull"
    installation.patch("trainingsession", session, {"spec": {"pod": {"image": f"{REPOSITORY}:nowhere"}}})
    wait_for(
        lambda: installation.condition(session, "Stalled").get("reason") == "ImagePullFailed",
        120,
        lambda: f"{session} says {installation.condition(session, 'Stalled')}",
    )
    assert (worker(), installation.condition(session)["status"]) == (before, "True")
    installation.patch("trainingsession", session, {"spec": {"pod": {"image": None}}})
    wait_for(lambda: installation.get("job", job) is None, 60, lambda: f"{job} is still there")
    assert worker() == before


def test_a_tag_that_moves_changes_nothing_since_the_volume_holds_its_digest(
    installation: Installation, next_image: LoadedImage, tmp_path: Path
) -> None:
    ask_for(installation, next_image)
    wait_upgraded(installation, next_image.name)
    wait_pinned(installation, next_image)

    assert load_variant(installation, next_image.name, tmp_path).digest != next_image.digest
    installation.kubectl("delete", "pod", POD)
    wait_for(lambda: installation.get("pod", POD), 60, lambda: "the pod does not come back")
    installation.kubectl("wait", f"pod/{POD}", "--for=condition=Ready", "--timeout=240s")
    [status] = (installation.get("pod", POD) or {})["status"]["containerStatuses"]
    assert status["imageID"] == next_image.pinned


def test_after_an_unclean_end_the_old_image_replays_and_then_the_new_one_starts(
    installation: Installation, next_image: LoadedImage, run: Run, undisturbed: Ending
) -> None:
    def upgrade_while_the_worker_dies() -> None:
        """Upgrade while the worker cannot hear the stop, and is killed before its snapshot."""
        installation.cluster.freeze_container(installation.namespace, POD, "worker")
        ask_for(installation, next_image)
        wait_for(lambda: is_terminating(installation), 60, lambda: "the old worker is not asked to stop")
        installation.cluster.kill_container(installation.namespace, POD, "worker")
        wait_upgraded(installation, next_image.name)

    before = replays(installation)
    ending = run(upgrade_while_the_worker_dies)
    assert ending.ran_each_step_once()
    assert ending == undisturbed
    assert replays(installation) != before


def load_variant(installation: Installation, name: str, directory: Path) -> LoadedImage:
    """Another one at each call, also under a name that is taken."""
    original, mark = build_images("trainer")["trainer"], uuid.uuid4().hex
    [image] = installation.cluster.load_image(write_variant(directory / f"{mark}.tar", name, original, mark))
    return image


def ask_for(installation: Installation, image: LoadedImage) -> None:
    installation.patch("trainingsession", SESSION, {"spec": {"pod": {"image": image.name}}})


def wait_upgraded(installation: Installation, image: str) -> None:
    """Wait until a worker serves that runs this image."""

    def upgraded() -> bool:
        status = (installation.get("trainingsession", SESSION) or {})["status"]
        return status.get("image") == image and installation.condition(SESSION).get("status") == "True"

    wait_for(upgraded, 420, lambda: f"{image} does not serve: {installation.condition(SESSION)}")


def wait_pinned(installation: Installation, image: LoadedImage) -> None:
    def digest() -> str | None:
        claim = installation.get("persistentvolumeclaim", CLAIM) or {}
        pinned: str | None = claim["metadata"]["annotations"].get("tinsmith.dev/image-digest")
        return pinned

    def template_image() -> str:
        workload = installation.get("statefulset", SESSION) or {}
        [container] = workload["spec"]["template"]["spec"]["containers"]
        return str(container["image"])

    wait_for(lambda: digest() == image.pinned, 60, lambda: f"{image.pinned} is not pinned, but {digest()}")
    # The workload follows its claim.
    wait_for(lambda: template_image() == image.pinned, 60, lambda: f"the next pod would run {template_image()}")


def replays(installation: Installation) -> str:
    """Return the times of returns to an old image. An image that has arrived forgets them."""
    of_session = f"involvedObject.kind=TrainingSession,involvedObject.name={SESSION},reason=ReplayingOnOldImage"
    when = "--output=jsonpath={.items[*].lastTimestamp}"
    return installation.kubectl("get", "events", f"--field-selector={of_session}", when)


def is_terminating(installation: Installation) -> bool:
    return "deletionTimestamp" in (installation.get("pod", POD) or {})["metadata"]
