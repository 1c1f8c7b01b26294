"""What can be read of the image for GPUs over NeMo RL, whose base of tens of gigabytes no test has."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

from images.sources import GPU_IMAGES, ROOT, version
from packaging.requirements import Requirement

IMAGE = GPU_IMAGES["trainer-nemo-rl"]
VERSIONS = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())
REQUIREMENTS = ROOT / "requirements" / "nemo-rl-image.txt"
PREBUILT = "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker"
NOT_IN_THIS_IMAGE = {"peft", "liger_kernel"}
"""The parity gate's yardstick, which no worker imports, and a kernel of the PEFT engine, which does without it."""
MODULES = {"grpc_health": "grpcio-health-checking"}


def lines(instruction: str) -> list[str]:
    return [" ".join(words[1:]) for words in IMAGE.instructions if words[0] == instruction]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for line in lines("ENV") for word in shlex.split(line))


def installed() -> set[str]:
    return {Requirement(line.removesuffix("\\")).name for line in re.findall(r"^\w.*", REQUIREMENTS.read_text(), re.M)}


def imported() -> set[str]:
    """The first names of all that the worker's modules import, wherever in them."""
    found: set[str] = set()
    for package in ("trainer_image/tinsmith_trainer", "rpc/tinsmith_rpc"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    found |= {name.name.partition(".")[0] for name in node.names}
                if isinstance(node, ast.ImportFrom) and node.module:
                    found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {"tinsmith_trainer", "tinsmith_rpc"}


def test_its_base_is_given_by_whoever_builds_it_and_has_to_be_the_commit_that_was_read() -> None:
    commit = VERSIONS["nemo-rl"]["commit"]
    assert lines("ARG") == ["BASE", f"NEMO_RL_COMMIT={commit}"]
    assert lines("FROM") == ["${BASE}"]
    assert 'rev-parse HEAD)" = "$NEMO_RL_COMMIT"' in lines("RUN")[0]


def test_a_base_without_the_ranks_python_is_refused_while_building() -> None:
    assert f"test -x /opt/ray_venvs/{PREBUILT}/bin/python" in lines("RUN")[0]


def test_it_takes_the_workers_packages_and_no_weights() -> None:
    copied = {source for line in lines("COPY") for source in line.split()[:-1]}
    assert copied == {"requirements/nemo-rl-image.txt", "trainer_image/tinsmith_trainer", "rpc/tinsmith_rpc"}
    assert lines("ADD") == []
    assert "<<" not in IMAGE.dockerfile.read_text()


def test_no_key_is_in_it() -> None:
    secret = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)
    assert [name for name in environment() if secret.search(name)] == []


def test_ours_is_on_the_path_of_the_driver_and_of_its_ranks_alike() -> None:
    [folder] = {line.split()[-1].rpartition("/")[0] for line in lines("COPY") if "/tinsmith_" in line}
    assert environment()["PYTHONPATH"] == folder
    assert f"--target {folder} " in lines("RUN")[1]


def test_packages_are_installed_by_hash_and_never_resolved() -> None:
    assert "--no-deps --require-hashes" in lines("RUN")[1]
    entries = re.split(r"\n(?=\w)", REQUIREMENTS.read_text())
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_lock_is_of_what_was_asked_for() -> None:
    asked = (REQUIREMENTS.with_suffix(".in")).read_text()
    assert re.findall(r"^\w.*", asked, re.M) == re.findall(r"^[\w.-]+==[\w.]+", REQUIREMENTS.read_text(), re.M)


def test_all_that_the_worker_imports_is_there_and_nothing_of_ours_hides_what_nemo_rl_pins() -> None:
    python = VERSIONS["nemo-rl"]["python"]
    brought = {*python["brings"], *python["brings_to_ranks"]}
    ours = {name for name in imported() - brought if MODULES.get(name, name) in installed()}
    assert imported() - brought - ours == NOT_IN_THIS_IMAGE
    assert not {MODULES.get(name, name) for name in brought} & installed()


def test_every_pin_has_its_reason() -> None:
    pins = [VERSIONS["nemo-rl"], *(value for value in VERSIONS["nemo-rl"].values() if isinstance(value, dict))]
    assert all(len(pin["reason"]) > 40 for pin in pins)


def test_it_runs_as_a_user_that_kubernetes_can_tell_is_not_root_and_serves_as_the_other_workers_do() -> None:
    assert lines("USER")[-1] == "65532:65532"
    assert lines("EXPOSE") == ["7443 7080"]
    assert [json.loads(line) for line in lines("ENTRYPOINT")] == [
        ["/opt/nemo_rl_venv/bin/python", "-m", "tinsmith_trainer"]
    ]
    labels = dict(word.split("=", 1) for line in lines("LABEL") for word in shlex.split(line))
    assert labels["org.opencontainers.image.version"] == version()


def test_versions_name_the_dockerfile_that_they_are_for() -> None:
    assert ROOT / "trainer_image" / VERSIONS["nemo-rl"]["dockerfile"] == IMAGE.dockerfile
    assert Path(IMAGE.dockerfile).is_file()
