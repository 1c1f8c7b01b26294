"""Every module of every package loads, on each Python that a user may have."""

from __future__ import annotations

import importlib.util

import pytest
from support.module_imports import PACKAGES, failed_imports, import_statements, sources

# NVIDIA's image alone has it.
NEVER_HERE = {"nemo_rl"}
# `make test-other-pythons` leaves them out of its environments.
WITH_PYTORCH = {"torch", "transformers", "peft", "accelerate", "ray", "megatron", "tinker_cookbook"}


@pytest.mark.parametrize("package", PACKAGES)
def test_each_module_is_this_pythons_language(package: str) -> None:
    for file in sources(package):
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.slow("imports every module, in a process of its own")
def test_each_module_loads(package: str) -> None:
    failed = failed_imports(import_statements(package))
    left_out = NEVER_HERE | (WITH_PYTORCH if importlib.util.find_spec("torch") is None else set())
    assert {statement: missing for statement, missing in failed.items() if missing not in left_out} == {}
