"""An upgrade of every image of the installation and a rollback, while a program trains. In the order of the file."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from cluster.node.conftest import EXAMPLES, NAMESPACE, SESSION, VALUES, Run, run_through_ingress
from support.client.pipelined_program import Ending
from support.kubernetes.installation import Installation, wait_for
from testcluster.cluster import Cluster
from testcluster.programs.archives import write_variant
from testcluster.project_images import build_images

POD = f"{SESSION}-0"
OLD_TAG = "earlier"
NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.1.0"


@pytest.fixture(scope="module")
def old(fresh_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Return the same programs under another tag and other digests."""
    directory = tmp_path_factory.mktemp("images")
    for name, archive in build_images().items():
        fresh_cluster.load_image(archive)
        image = f"tinsmith.local/tinsmith/{name}:{OLD_TAG}"
        fresh_cluster.load_image(write_variant(directory / f"{name}.tar", image, archive, "old"))
    fresh_cluster.make_namespace(NAMESPACE)
    return Installation(fresh_cluster, NAMESPACE, {**VALUES, "image": {"tag": OLD_TAG}})


@pytest.fixture(scope="module")
def new(installation: Installation) -> Installation:
    return Installation(installation.cluster, NAMESPACE, VALUES)


@pytest.fixture(scope="module")
def installation(old: Installation) -> Iterator[Installation]:
    old.install()
    old.apply(EXAMPLES / "tiny-model.yaml")
    old.kubectl("wait", "job/make-tiny-model", "--for=condition=complete", "--timeout=420s")
    old.apply(EXAMPLES / "session.yaml")
    old.wait_ready(SESSION)
    old.wait_answering()
    yield old
    old.cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture
def session(installation: Installation) -> str:
    return SESSION


@pytest.fixture(scope="module")
def undisturbed(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Ending:
    return run_through_ingress(installation, lambda: None, tmp_path_factory.mktemp("undisturbed"))


def test_an_upgrade_while_a_program_trains_restarts_no_worker(
    installation: Installation, new: Installation, run: Run, undisturbed: Ending
) -> None:
    before = worker_of(installation)
    ending = run(lambda: upgrade(new))
    assert ending.ran_each_step_once()
    assert ending == undisturbed
    assert worker_of(installation) == before


def test_the_session_says_that_there_is_another_image_and_takes_it_when_it_is_asked_to(
    installation: Installation, run: Run, undisturbed: Ending
) -> None:
    available = wait_for(
        lambda: new_image_condition(installation), 60, lambda: "the session does not say that there is a newer image"
    )
    assert NEW_IMAGE in available["message"]
    now = datetime.now(UTC).isoformat(timespec="seconds")

    def opt_in() -> None:
        installation.kubectl("annotate", "trainingsession", SESSION, f"tinsmith.dev/restart-requested-at={now}")
        wait_for(lambda: worker_of(installation)[1] == NEW_IMAGE, 120, lambda: f"it runs {worker_of(installation)}")
        installation.wait_ready(SESSION)

    assert run(opt_in) == undisturbed
    wait_for(lambda: not new_image_condition(installation), 60, lambda: "the session still asks for a newer image")


def test_a_rollback_while_a_program_trains_loses_no_step(
    installation: Installation, run: Run, undisturbed: Ending
) -> None:
    """The earlier operator takes the worker back to its own image, after a snapshot."""

    def roll_back() -> None:
        installation.helm("rollback", installation.release, "1", "--wait", "--timeout", "5m")

    ending = run(roll_back)
    assert ending.ran_each_step_once()
    assert ending == undisturbed


def worker_of(installation: Installation) -> tuple[str, str, int]:
    """Return the UID of the worker's pod, its image, and how often its container was restarted."""
    pod: dict[str, Any] = installation.get("pod", POD) or {}
    if not pod.get("status", {}).get("containerStatuses"):
        return "", "", 0
    [container], [status] = pod["spec"]["containers"], pod["status"]["containerStatuses"]
    return pod["metadata"]["uid"], container["image"], status["restartCount"]


def new_image_condition(installation: Installation) -> dict[str, Any] | None:
    condition = installation.condition(SESSION, "UpgradeAvailable")
    return condition if condition.get("status") == "True" else None


def upgrade(to: Installation) -> None:
    to.install()
