"""The RayCluster, and the programs in KubeRay's pods."""

from __future__ import annotations

import re
import socket
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.operator.built_sessions import NEMO_RL
from support.operator.resources import INSTALLATION, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.training_session import Engine
from tinsmith_operator.build.network import build_service
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.build.workload import PREPARE_RAY, VERSION_ON_CPUS, VERSIONS_ON_GPUS, build_workload
from tinsmith_operator.installation import Installation

ROOT = Path(__file__).parents[4]
PLAN = WorkerPlan("claim-uid", PinnedImage("image", None), 1)


def group(installation: Installation = INSTALLATION, replicas: int = 1, **spec: Any) -> Manifest:
    divided: Manifest = {**NEMO_RL, "parallelism": {"nodes": 4}, "modelCache": {"claimName": "models"}}
    session = make_session(**{**divided, **spec})
    return build_workload(session, installation, replace(PLAN, replicas=replicas))


def head_of(cluster: Manifest) -> Manifest:
    template: Manifest = cluster["spec"]["headGroupSpec"]["template"]
    return template


def member_of(cluster: Manifest) -> Manifest:
    [members] = cluster["spec"]["workerGroupSpecs"]
    template: Manifest = members["template"]
    return template


def container_of(template: Manifest) -> Manifest:
    [container] = template["spec"]["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize(("replicas", "suspend"), [(1, False), (0, True)])
def test_a_session_without_pods_is_a_suspended_cluster(replicas: int, suspend: bool) -> None:
    assert group(replicas=replicas)["spec"]["suspend"] is suspend


def test_the_service_does_not_select_members() -> None:
    cluster = group()
    selector = build_service(make_session())["spec"]["selector"].items()
    assert selector <= head_of(cluster)["metadata"]["labels"].items()
    assert not selector <= member_of(cluster)["metadata"]["labels"].items()


def test_a_shell_can_parse_the_scripts() -> None:
    """The kubelet gives scripts to the shell with one dollar for two in commands, and unchanged in hooks."""
    cluster = group()
    member = container_of(member_of(cluster))
    [shell, _, hook] = member["lifecycle"]["preStop"]["exec"]["command"]
    commands = [container_of(head_of(cluster))["command"], member["command"]]
    for script in (hook, *(command[2].replace("$$", "$") for command in commands)):
        assert "$$" not in script
        subprocess.run([shell, "-n", "-c", script], check=True, timeout=10)


def test_the_hook_ends_when_the_heads_port_is_closed(tmp_path: Path) -> None:
    [shell, options, hook] = container_of(member_of(group()))["lifecycle"]["preStop"]["exec"]["command"]
    place = tmp_path / "head"
    place.write_text("127.0.0.1\n")
    with socket.create_server(("127.0.0.1", 0)) as head:
        script = hook.replace("/tmp/head", str(place)).replace("6379", str(head.getsockname()[1]))
        waiting = subprocess.Popen([shell, options, script])
        head.settimeout(10)
        head.accept()[0].close()
        assert waiting.poll() is None
    assert waiting.wait(20) == 0


def test_ranks_inherit_no_credentials_of_the_checkpoint_root() -> None:
    """The script of the head, with other programs of the names that it starts."""
    [shell, options, script, name] = container_of(head_of(group()))["command"]
    unset = 'while [ "$1" = -u ]; do unset "$2"; shift 2; done'
    stand_ins = f"ulimit() {{ :; }}; rm() {{ :; }}; exec() {{ :; }}; env() {{ {unset}; printenv; }};"
    told = subprocess.run(
        [shell, options, stand_ins + script.replace("$$", "$"), name],
        env={"PATH": "/usr/bin:/bin", "POD_IP": "10.0.0.1", "AWS_SECRET_ACCESS_KEY": "secret", "HF_HOME": "/cache"},
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout
    assert "HF_HOME=/cache" in told
    assert "AWS_" not in told


def test_a_node_that_allows_few_open_files_is_taken_as_it_is() -> None:
    """Pods are not root: they cannot raise the limit that the node gives them, and would end in a loop."""
    allows_few = "ulimit() { case $* in -Hn) echo 4096 ;; '-n 4096') echo as many as may be ;; *) return 1 ;; esac; };"
    told = subprocess.run(
        ["/bin/bash", "-ec", f"{allows_few} rm() {{ :; }}; {PREPARE_RAY}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout
    assert told == "as many as may be\n"


def test_the_versions_of_ray_are_those_of_the_projects_images() -> None:
    locked = re.search(r"^ray==(\S+)", (ROOT / "dev" / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    assert locked is not None
    assert locked[1] == VERSION_ON_CPUS
    versions = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())
    for engine, own in VERSIONS_ON_GPUS.items():
        assert versions[engine.value]["ray"]["version"] == own
    assert set(VERSIONS_ON_GPUS) == {engine for engine in Engine if engine.divides}
