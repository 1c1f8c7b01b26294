"""The images for GPUs whose bases have the ranks of an engine: what can be read of them."""

from __future__ import annotations

import json

import pytest
from images.sources import version
from support.base_images import MODULES, OnABase, imported_by_the_worker

PROGRAMS = {"nemo-rl": "/opt/nemo_rl_venv/bin/python", "miles": "python3"}
NOT_THERE = {
    "nemo-rl": {"peft", "liger_kernel", "opentelemetry", "miles"},
    "miles": {"peft", "liger_kernel", "opentelemetry", "nemo_rl"},
}
"""The parity gate's yardstick, which no worker imports; a kernel of the PEFT engine, which does without it; traces,
which a worker does without; and what stands behind another engine's door."""


@pytest.fixture(params=list(PROGRAMS))
def base(request: pytest.FixtureRequest) -> OnABase:
    return OnABase(request.param)


def test_tinsmith_is_first_on_the_path_of_the_driver_and_of_its_ranks(base: OnABase) -> None:
    [folder] = {line.split()[-1].rpartition("/")[0] for line in base.lines("COPY") if "/tinsmith_" in line}
    assert base.environment()["PYTHONPATH"].split(":")[0] == folder
    assert f"--target {folder} " in base.lines("RUN")[1]


def test_all_imports_of_the_worker_are_there_and_none_hides_a_package_of_the_base(base: OnABase) -> None:
    missing = {
        name for name in imported_by_the_worker() - base.brought if MODULES.get(name, name) not in base.installed()
    }
    assert missing == NOT_THERE[base.engine]
    assert not {MODULES.get(name, name) for name in base.brought} & base.installed()


def test_it_runs_as_a_user_that_kubernetes_can_tell_is_not_root_and_serves_as_the_other_workers_do(
    base: OnABase,
) -> None:
    assert base.lines("USER")[-1] == "65532:65532"
    assert base.lines("EXPOSE") == ["7443 7080"]
    program = [PROGRAMS[base.engine], "-m", "tinsmith_trainer"]
    assert [json.loads(line) for line in base.lines("ENTRYPOINT")] == [program]
    assert base.labels()["org.opencontainers.image.version"] == version()
