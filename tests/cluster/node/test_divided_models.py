"""Sessions whose ranks are Ray's actors in pods: in one pod, and in those that KubeRay makes.

On CPUs: Megatron's layers, optimizer and schedules are real, and so are Ray, KubeRay and what its pods tell each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from cluster.node.conftest import EXAMPLES, wait_gone
from support.client.pipelined_program import Ending, checkpoint_run_folder, run_program
from support.kubernetes.installation import Installation, Object
from testcluster.addons.kuberay import install_kuberay_kinds, kuberay_operator
from testcluster.errors import ClusterError
from testcluster.project_images import build_images

IMAGE = "tinsmith.local/tinsmith/trainer-megatron:0.1.0"
RESOURCES = {"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}}
NOTHING_TO_CONVERT = "ranks on CPUs read the model's own files: there is nothing to convert"
WORKERS, MEMBERS = "app.kubernetes.io/name=tinsmith-worker", "ray.io/node-type=worker"
# As Ray calls the process of an actor; one of them ends at once.
KILL_A_RANK = """for process in /proc/[0-9]*; do
    if grep --quiet --text '^ray::RankActor' "$process/cmdline"; then kill -KILL "${process#/proc/}"; exit; fi
done
exit 1"""


@pytest.fixture(scope="module")
def with_ranks(installation: Installation) -> Installation:
    """Return an installation whose node has the image with ranks on CPUs."""
    for archive in build_images("trainer-megatron").values():
        installation.cluster.load_image(archive)
    return installation


@pytest.fixture(scope="module")
def with_kuberay(with_ranks: Installation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """KubeRay looks after the installation's namespace."""
    install_kuberay_kinds(with_ranks.cluster.kubectl)
    log = tmp_path_factory.mktemp("kuberay") / "log"
    with kuberay_operator(with_ranks.cluster.kubeconfig, with_ranks.namespace, log):
        yield with_ranks


def divided(name: str, engine: str, **parallelism: int) -> Object:
    """Return the session of the examples, divided. Its model has the session's name."""
    session: Object = yaml.safe_load((EXAMPLES / "session.yaml").read_text())
    session["metadata"]["name"] = name
    spec = session["spec"]
    spec["model"]["name"] = f"demo/{name}"
    spec["engine"], spec["parallelism"] = engine, parallelism
    spec["resources"], spec["pod"] = RESOURCES, {"image": IMAGE}
    spec["storage"]["retentionPolicy"] = {"whenDeleted": "Delete"}
    return session


def converted(session: Object) -> Object:
    """Return the session with a Job that converts its model."""
    session["spec"]["modelCache"] = {"claimName": "models"}
    return session


@contextmanager
def session_of(installation: Installation, session: Object) -> Iterator[str]:
    """Ready to train, behind what its Job says if there is a cache of the model; gone afterwards, with all its pods."""
    name: str = session["metadata"]["name"]
    installation.apply(session)
    try:
        installation.wait_ready(name, timeout_seconds=480)
        if "modelCache" in session["spec"]:
            assert last_log_line_of_the_conversion(installation, name) == NOTHING_TO_CONVERT
        yield name
    finally:
        installation.kubectl("delete", "trainingsession", name, "--wait=false")
        wait_gone(installation, "trainingsession", name)


def last_log_line_of_the_conversion(installation: Installation, name: str) -> str:
    """Return the last words in the log of the only try that its Job needed."""
    [pod] = installation.list("pod", f"app.kubernetes.io/name=tinsmith-conversion,tinsmith.dev/session={name}")
    assert pod["status"]["phase"] == "Succeeded"
    *_, last = installation.kubectl("logs", pod["metadata"]["name"]).splitlines()
    said: str = json.loads(last)["event"]
    return said


def run_on_session(installation: Installation, name: str, disturb: Callable[[], None], directory: Path) -> Ending:
    def fetch_checkpoint(tinker_path: str) -> Path:
        return installation.fetch_checkpoint_folder(checkpoint_run_folder(tinker_path), directory)

    with installation.service_client() as client:
        return run_program(client, f"demo/{name}", disturb, fetch_checkpoint)


def runs_of(installation: Installation, name: str) -> tuple[str, int]:
    """Return the worker's pod, and how often its container was restarted."""
    [pod] = installation.list("pod", f"{WORKERS},tinsmith.dev/session={name}")
    return pod["metadata"]["uid"], sum(each["restartCount"] for each in pod["status"].get("containerStatuses", []))


def test_a_model_divided_within_a_pod_trains(with_ranks: Installation, tmp_path: Path) -> None:
    with session_of(with_ranks, converted(divided("within", "nemo-rl", tensor=2))) as name:
        assert run_on_session(with_ranks, name, lambda: None, tmp_path / "checkpoint").ran_each_step_once()


def test_the_loss_of_a_rank_within_a_pod_is_invisible_to_a_program(with_ranks: Installation, tmp_path: Path) -> None:
    """Ranks of Miles, which read the model's own files: there is no Job and no cache."""
    with session_of(with_ranks, divided("first", "miles", tensor=2)) as name:
        undisturbed = run_on_session(with_ranks, name, lambda: None, tmp_path / "undisturbed")
        assert undisturbed.ran_each_step_once()
        pod, starts = runs_of(with_ranks, name)

        def lose_a_rank() -> None:
            with_ranks.kubectl("exec", f"{name}-0", "--", "bash", "-c", KILL_A_RANK)

        assert run_on_session(with_ranks, name, lose_a_rank, tmp_path / "disturbed") == undisturbed
        assert runs_of(with_ranks, name) == (pod, starts + 1)
        assert with_ranks.list("job", f"tinsmith.dev/session={name}") == []


def test_the_loss_of_a_pod_of_several_is_invisible_to_a_program(with_kuberay: Installation, tmp_path: Path) -> None:
    """All of them start anew together, and what was acknowledged is done once: the last bit is the same."""
    with session_of(with_kuberay, converted(divided("across", "nemo-rl", nodes=2))) as name:
        undisturbed = run_on_session(with_kuberay, name, lambda: None, tmp_path / "undisturbed")
        assert undisturbed.ran_each_step_once()
        worker = runs_of(with_kuberay, name)

        def lose_the_member() -> None:
            """Kill the member with its rank at once: a pod that is deleted in order outlives the head."""
            [pod] = with_kuberay.list("pod", f"{MEMBERS},tinsmith.dev/session={name}")
            with suppress(ClusterError):  # The shell may not live to tell.
                with_kuberay.kubectl("exec", pod["metadata"]["name"], "--", "bash", "-c", "kill -KILL -1")

        assert run_on_session(with_kuberay, name, lose_the_member, tmp_path / "disturbed") == undisturbed
        # Further rounds cannot be done by those that are left.
        assert run_on_session(with_kuberay, name, lambda: None, tmp_path / "afterwards") == undisturbed
        assert runs_of(with_kuberay, name) != worker
