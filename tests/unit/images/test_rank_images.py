"""The images for GPUs whose bases have the ranks of an engine: what can be read of them."""

from __future__ import annotations

import json
import re

import pytest
from images.sources import ROOT, version
from support.base_images import MODULES, OnABase, imported_by_the_worker

PROGRAMS = {"nemo-rl": "/opt/nemo_rl_venv/bin/python", "miles": "python3"}
NOT_THERE = {"nemo-rl": {"peft", "liger_kernel", "miles"}, "miles": {"peft", "liger_kernel", "nemo_rl"}}
"""The parity gate's yardstick, which no worker imports; a kernel of the PEFT engine, which does without it; and what
stands behind another engine's door."""


@pytest.fixture(params=list(PROGRAMS))
def base(request: pytest.FixtureRequest) -> OnABase:
    return OnABase(request.param)


def test_it_takes_the_workers_packages_and_no_weights(base: OnABase) -> None:
    copied = {source for line in base.lines("COPY") for source in line.split()[:-1]}
    own = f"requirements/{base.requirements.name}"
    assert copied == {own, "trainer_image/tinsmith_trainer", "rpc/tinsmith_rpc"}
    assert base.lines("ADD") == []
    assert "<<" not in base.image.dockerfile.read_text()


def test_no_key_is_in_it(base: OnABase) -> None:
    secret = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|_KEY", re.IGNORECASE)
    assert [name for name in base.environment() if secret.search(name)] == []


def test_ours_is_first_on_the_path_of_the_driver_and_of_its_ranks_alike(base: OnABase) -> None:
    [folder] = {line.split()[-1].rpartition("/")[0] for line in base.lines("COPY") if "/tinsmith_" in line}
    assert base.environment()["PYTHONPATH"].split(":")[0] == folder
    assert f"--target {folder} " in base.lines("RUN")[1]


def test_packages_are_installed_by_hash_and_never_resolved(base: OnABase) -> None:
    assert "--no-deps --require-hashes" in base.lines("RUN")[1]
    entries = re.split(r"\n(?=\w)", base.requirements.read_text())
    assert [entry.splitlines()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_lock_is_of_what_was_asked_for(base: OnABase) -> None:
    asked = (base.requirements.with_suffix(".in")).read_text()
    locked = re.findall(r"^[\w.-]+==[\w.]+", base.requirements.read_text(), re.M)
    assert re.findall(r"^\w.*", asked, re.M) == locked


def test_all_that_the_worker_imports_is_there_and_nothing_of_ours_hides_what_the_base_brings(base: OnABase) -> None:
    missing = {
        name for name in imported_by_the_worker() - base.brought if MODULES.get(name, name) not in base.installed()
    }
    assert missing == NOT_THERE[base.engine]
    assert not {MODULES.get(name, name) for name in base.brought} & base.installed()


def test_every_pin_has_its_reason(base: OnABase) -> None:
    pins = [base.versions, *(value for value in base.versions.values() if isinstance(value, dict))]
    assert all(len(pin["reason"]) > 40 for pin in pins)


def test_it_runs_as_a_user_that_kubernetes_can_tell_is_not_root_and_serves_as_the_other_workers_do(
    base: OnABase,
) -> None:
    assert base.lines("USER")[-1] == "65532:65532"
    assert base.lines("EXPOSE") == ["7443 7080"]
    program = [PROGRAMS[base.engine], "-m", "tinsmith_trainer"]
    assert [json.loads(line) for line in base.lines("ENTRYPOINT")] == [program]
    assert base.labels()["org.opencontainers.image.version"] == version()


def test_versions_name_the_dockerfile_that_they_are_for(base: OnABase) -> None:
    assert ROOT / "trainer_image" / base.versions["dockerfile"] == base.image.dockerfile
    assert base.image.dockerfile.is_file()
