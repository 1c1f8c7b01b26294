"""Imports every module of a package in a process of its own, and says which imports failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "tinsmith": "client",
    "tinsmith_operator": "operator",
    "tinsmith_rpc": "rpc",
    "tinsmith_server": "api_server",
    "tinsmith_trainer": "trainer_image",
}

RUN_ALL = """
import gc, json, os, sys

gc.disable()
failed = {}
for statement in json.load(sys.stdin):
    try:
        exec(statement, {})
    except ModuleNotFoundError as error:
        failed[statement] = error.name.partition(".")[0]
    except ImportError as error:
        failed[statement] = str(error)
json.dump(failed, sys.stderr)
sys.stderr.flush()
os._exit(0)
"""
"""It neither scans the imported modules for garbage nor unloads them, which takes as long as some of the imports."""


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / PACKAGES[package] / package).rglob("*.py"))
    assert files
    return files


def import_statements(package: str) -> list[str]:
    return [f"import {_module_name(package, file)}" for file in sources(package) if not _is_loaded_by_name_alone(file)]


def failed_imports(statements: Sequence[str], first_on_path: Path | None = None) -> dict[str, str]:
    """Return each statement that fails, with the package that is missing or the error.

    A new process runs them: modules that this test run has loaded would hide what is missing. Packages in
    `first_on_path` hide those of this environment.
    """
    path = {} if first_on_path is None else {"PYTHONPATH": str(first_on_path)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL],
        input=json.dumps(statements),
        env={**os.environ, **path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    failed: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return failed


def _module_name(package: str, file: Path) -> str:
    parts = file.relative_to(ROOT / PACKAGES[package]).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_loaded_by_name_alone(file: Path) -> bool:
    """Programs and the ASGI application run when they are imported, and migrations are alembic's."""
    return file.name in {"__main__.py", "asgi.py"} or "migrations" in file.parts
