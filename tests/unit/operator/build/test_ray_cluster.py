"""What KubeRay is told, and what runs in the pods that it makes."""

from __future__ import annotations

import re
import socket
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.operator.built_sessions import MILES, NEMO_RL
from support.operator.resources import FROM_HUB, INSTALLATION, make_session
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.training_session import Engine
from tinsmith_operator.build.network import build_service, build_session_policy
from tinsmith_operator.build.worker import PinnedImage, WorkerPlan
from tinsmith_operator.build.workload import PREPARE_RAY, RAYLET_PORT, VERSION_ON_CPUS, VERSIONS_ON_GPUS, build_workload
from tinsmith_operator.installation import Installation

ROOT = Path(__file__).parents[4]
PLAN = WorkerPlan("claim-uid", PinnedImage("image", None), 1)
GPUS: Manifest = {"resources": {"limits": {"nvidia.com/gpu": 8, "memory": "64Gi", "rdma/hca": 1}}}


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


def test_it_has_one_pod_for_each_node_and_never_more_or_fewer() -> None:
    [members] = group()["spec"]["workerGroupSpecs"]
    assert [members[field] for field in ("replicas", "minReplicas", "maxReplicas")] == [3, 3, 3]


@pytest.mark.parametrize(("replicas", "suspend"), [(1, False), (0, True)])
def test_a_session_without_pods_is_a_suspended_cluster(replicas: int, suspend: bool) -> None:
    assert group(replicas=replicas)["spec"]["suspend"] is suspend


def test_members_are_not_what_the_service_finds() -> None:
    cluster = group()
    selector = build_service(make_session())["spec"]["selector"].items()
    assert selector <= head_of(cluster)["metadata"]["labels"].items()
    assert not selector <= member_of(cluster)["metadata"]["labels"].items()


def test_each_pod_has_what_the_spec_asks_for_devices_of_others_included() -> None:
    cluster = group(**GPUS)
    for template in (head_of(cluster), member_of(cluster)):
        assert container_of(template)["resources"] == GPUS["resources"]


def test_a_member_has_neither_the_journal_nor_certificates_nor_credentials() -> None:
    cluster = group(replace(INSTALLATION, checkpoint_secret="store", checkpoint_environment={"AWS_REGION": "eu"}))
    member = container_of(member_of(cluster))
    assert "envFrom" not in member
    assert "AWS_REGION" not in {variable["name"] for variable in member["env"]}
    names = {volume["name"] for volume in member_of(cluster)["spec"]["volumes"]}
    assert names == {"model-cache", "tmp", "home", "ray", "shared-memory"}


def test_a_member_gets_more_time_to_stop_than_the_head_and_waits_for_its_end() -> None:
    cluster = group(**GPUS)
    head, member = (each["spec"]["terminationGracePeriodSeconds"] for each in (head_of(cluster), member_of(cluster)))
    assert member > head
    [*_, script] = container_of(member_of(cluster))["lifecycle"]["preStop"]["exec"]["command"]
    assert "/dev/tcp/$head/6379" in script


def test_no_probe_asks_a_rank() -> None:
    member = container_of(member_of(group()))
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert member[probe]["tcpSocket"] == {"port": RAYLET_PORT}


def test_the_scripts_are_what_a_shell_can_read() -> None:
    """As the kubelet gives them to the shell: with one dollar for two in commands, and as they are in hooks."""
    cluster = group()
    member = container_of(member_of(cluster))
    [shell, _, hook] = member["lifecycle"]["preStop"]["exec"]["command"]
    commands = [container_of(head_of(cluster))["command"], member["command"]]
    for script in (hook, *(command[2].replace("$$", "$") for command in commands)):
        assert "$$" not in script
        subprocess.run([shell, "-n", "-c", script], check=True, timeout=10)


def test_the_hook_ends_when_nobody_listens_where_the_head_was(tmp_path: Path) -> None:
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


def test_all_ports_are_open_between_the_pods_of_one_session_and_to_nobody_else() -> None:
    session = make_session(**NEMO_RL, parallelism={"nodes": 2}, modelCache={"claimName": "models"})
    spec = build_session_policy(session, INSTALLATION)["spec"]
    own = {"podSelector": {"matchLabels": {"tinsmith.dev/session": "qwen"}}}
    assert spec["podSelector"] == own["podSelector"]
    wide_in = [rule["from"] for rule in spec["ingress"] if rule["ports"] == [{"protocol": "TCP"}]]
    wide_out = [rule["to"] for rule in spec["egress"] if rule["ports"] == [{"protocol": "TCP"}]]
    assert (wide_in, wide_out) == ([[own]], [[own]])


def test_labels_of_the_installation_are_on_the_cluster_and_take_the_place_of_none_of_ours() -> None:
    labels = {"ray.io/gang-scheduling-enabled": "true", "tinsmith.dev/session": "another"}
    said = group(replace(INSTALLATION, ray_cluster_labels=labels))["metadata"]["labels"]
    assert said["ray.io/gang-scheduling-enabled"] == "true"
    assert said["tinsmith.dev/session"] == "qwen"


def test_kuberay_is_told_the_ray_of_the_image() -> None:
    assert group()["spec"]["rayVersion"] == VERSION_ON_CPUS
    assert group(**GPUS)["spec"]["rayVersion"] == VERSIONS_ON_GPUS[Engine.NEMO_RL]
    assert group(**MILES)["spec"]["rayVersion"] == VERSION_ON_CPUS
    assert group(**MILES, **GPUS)["spec"]["rayVersion"] == VERSIONS_ON_GPUS[Engine.MILES]
    assert group(replace(INSTALLATION, ray_version="2.58.0"), **GPUS)["spec"]["rayVersion"] == "2.58.0"


def test_the_versions_of_ray_are_those_of_the_projects_images() -> None:
    locked = re.search(r"^ray==(\S+)", (ROOT / "requirements" / "dev.txt").read_text(), re.MULTILINE)
    assert locked is not None
    assert locked[1] == VERSION_ON_CPUS
    versions = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())
    for engine, own in VERSIONS_ON_GPUS.items():
        assert versions[engine.value]["ray"]["version"] == own
    assert set(VERSIONS_ON_GPUS) == {engine for engine in Engine if engine.divides}


def test_every_pod_of_a_group_finds_a_model_on_a_claim_at_one_path() -> None:
    """Ranks of Miles read the files as they were published, each on its node, by the path that the head tells them."""
    cluster = group(**MILES, modelCache=None)
    mounted = [
        [mount for mount in template["spec"]["containers"][0]["volumeMounts"] if mount["mountPath"] == "/models"]
        for template in (head_of(cluster), member_of(cluster))
    ]
    assert mounted[0] == mounted[1] != []


def test_every_pod_of_a_group_finds_a_model_that_the_head_downloaded() -> None:
    cluster = group(**MILES, source=FROM_HUB)
    for template in (head_of(cluster), member_of(cluster)):
        [cache] = [volume for volume in template["spec"]["volumes"] if volume["name"] == "model-cache"]
        assert cache["persistentVolumeClaim"] == {"claimName": "models"}
