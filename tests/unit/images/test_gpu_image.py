"""Promises of the image on vLLM's or SGLang's that its Dockerfile shows; its base is too large for a test."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

from images.sources import GPU_IMAGES, ROOT, version
from packaging.requirements import Requirement
from support.base_images import imported_by_the_worker

IMAGE = GPU_IMAGES["trainer-gpu"]
VERSIONS = tomllib.loads((ROOT / "trainer_image" / "versions.toml").read_text())["gpu"]
REQUIREMENTS = ROOT / "dev" / "requirements" / "gpu-image.txt"
TRAINER_LOCK = ROOT / "dev" / "requirements" / "trainer-image.txt"
TESTS_LOCK = ROOT / "dev" / "requirements" / "dev.txt"
ASSUMPTIONS = tomllib.loads((ROOT / "tests" / "support" / "token_server" / "assumptions.toml").read_text())
FOR_GPUS_ALONE = {"liger-kernel"}
ANOTHER_IMAGES = {"megatron", "miles", "nemo_rl", "ray"}
"""What the engines on many GPUs import, whose images are others."""
OPTIONAL = {"opentelemetry"}
"""Without it a worker makes no traces, and says so."""
PACKAGES = {"grpc_health": "grpcio-health-checking", "grpc": "grpcio", "liger_kernel": "liger-kernel"}


def lines(instruction: str) -> list[str]:
    return [" ".join(words[1:]) for words in IMAGE.instructions if words[0] == instruction]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for line in lines("ENV") for word in shlex.split(line))


def entries(lock: Path) -> dict[str, str]:
    """Each package's requirement with its hashes, by its name."""
    text = re.sub(r"^ *#.*\n", "", lock.read_text(), flags=re.MULTILINE)
    found = [entry.strip() for entry in re.split(r"\n(?=\w)", text)]
    return {Requirement(entry.partition("\\")[0]).name: entry for entry in found}


def test_the_tags_of_its_bases_are_the_versions_that_the_assumptions_are_about() -> None:
    for kind in ("vllm", "sglang"):
        assert VERSIONS[kind]["image"].endswith(f":v{VERSIONS[kind]['version']}")
        assert len(VERSIONS[kind]["reason"]) > 40
    documents = [each["where"] for each in ASSUMPTIONS["vllm"] if "docs.vllm.ai" in each["where"]]
    assert all(f"/v{VERSIONS['vllm']['version']}/" in where for where in documents)
    assert ROOT / "trainer_image" / VERSIONS["dockerfile"] == IMAGE.dockerfile


def test_tinsmith_is_on_the_path_of_the_bases_python() -> None:
    [folder] = {line.split()[-1].rpartition("/")[0] for line in lines("COPY") if "/tinsmith_" in line}
    assert environment()["PYTHONPATH"] == folder
    assert f"--target {folder} " in lines("RUN")[1]


def test_its_packages_are_those_of_the_workers_own_image_or_of_the_tests_by_the_same_hashes() -> None:
    trainers, tests = entries(TRAINER_LOCK), entries(TESTS_LOCK)
    assert not FOR_GPUS_ALONE & trainers.keys()
    assert "--no-deps --require-hashes" in lines("RUN")[1]
    for name, entry in entries(REQUIREMENTS).items():
        assert "--hash=sha256:" in entry
        held = tests[name].replace(" ; sys_platform == 'linux'", "") if name in FOR_GPUS_ALONE else trainers[name]
        assert set(entry.split()) == set(held.split())


def test_all_imported_packages_are_there_and_none_hides_a_package_that_the_base_pins() -> None:
    brought, installed = set(VERSIONS["brings"]), set(entries(REQUIREMENTS))
    missing = {name for name in imported_by_the_worker() - brought if PACKAGES.get(name, name) not in installed}
    assert missing == ANOTHER_IMAGES | OPTIONAL
    assert not {"torch", "transformers", "numpy", "protobuf", "vllm", "sglang"} & installed


def test_a_base_that_lacks_something_fails_the_build() -> None:
    check = lines("RUN")[2]
    assert "import tinsmith_trainer.worker.startup" in check
    assert "find_spec('vllm') or u.find_spec('sglang')" in check


def test_it_runs_as_a_user_that_kubernetes_can_tell_is_not_root_and_serves_as_the_other_workers_do() -> None:
    assert lines("USER")[-1] == "65532:65532"
    assert lines("EXPOSE") == ["7443 7080"]
    assert [json.loads(line) for line in lines("ENTRYPOINT")] == [["python3", "-m", "tinsmith_trainer"]]
    labels = dict(word.split("=", 1) for line in lines("LABEL") for word in shlex.split(line))
    assert labels["org.opencontainers.image.version"] == version()
