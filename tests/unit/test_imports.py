"""Every module of every package loads, on each Python that a user may have."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "tinsmith": "client",
    "tinsmith_operator": "operator",
    "tinsmith_rpc": "rpc",
    "tinsmith_server": "api_server",
    "tinsmith_trainer": "trainer_image",
}

# NVIDIA's image alone has it.
NEVER_HERE = {"nemo_rl"}
# `make test-other-pythons` leaves them out of its environments.
WITH_PYTORCH = {"torch", "transformers", "peft", "accelerate", "ray", "megatron", "tinker_cookbook"}

IMPORT_ALL = """
import importlib, json, sys

missing = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing[name] = error.name.partition(".")[0]
json.dump(missing, sys.stderr)
"""


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / PACKAGES[package] / package).rglob("*.py"))
    assert files
    return files


def module_name(package: str, file: Path) -> str:
    parts = file.relative_to(ROOT / PACKAGES[package]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_loaded_by_name_alone(file: Path) -> bool:
    """Programs and the ASGI application run when they are imported, and migrations are alembic's."""
    return file.name in {"__main__.py", "asgi.py"} or "migrations" in file.parts


@pytest.mark.parametrize("package", PACKAGES)
def test_each_module_is_this_pythons_language(package: str) -> None:
    for file in sources(package):
        compile(file.read_bytes(), str(file), "exec", dont_inherit=True)


@pytest.mark.parametrize("package", PACKAGES)
def test_each_module_loads(package: str) -> None:
    """In a process of its own: what one test run has loaded already would hide what is missing."""
    names = [module_name(package, file) for file in sources(package) if not is_loaded_by_name_alone(file)]

    command = [sys.executable, "-c", IMPORT_ALL]
    done = subprocess.run(command, input=json.dumps(names), capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]
    missing: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    left_out = NEVER_HERE | (WITH_PYTORCH if importlib.util.find_spec("torch") is None else set())
    assert {name: without for name, without in missing.items() if without not in left_out} == {}
