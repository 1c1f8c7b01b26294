"""The imports of a starting server: a second of imports is a second of waiting."""

from __future__ import annotations

import json
import subprocess
import sys

LOADED_BY = """
import importlib, json, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
print(json.dumps([name for name in json.loads(sys.argv[2]) if name in sys.modules]))
"""

TO_START_A_WORKER = ("tinsmith_server.cli.serving", "tinsmith_server.fleet.local.fleet")
THE_REST = ("tinsmith_server.app", "tinsmith_server.cli.connections", "tinsmith_server.cli.connections")

FOR_REQUESTS = ("alembic", "anyio", "fastapi", "fsspec", "prometheus_client", "sqlalchemy", "uvicorn")
OF_OTHERS = ("aiohttp", "kubernetes", "numpy", "peft", "psycopg", "ray", "s3fs", "tinker", "torch", "transformers")


def loaded(watched: tuple[str, ...], by: tuple[str, ...]) -> list[str]:
    """Return the loaded modules of a fresh process."""
    command = [sys.executable, "-c", LOADED_BY, json.dumps(by), json.dumps(watched)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(done.stdout)
    return found


def test_a_worker_is_started_before_anything_is_imported_that_answers_requests() -> None:
    assert loaded((*FOR_REQUESTS, *OF_OTHERS), by=TO_START_A_WORKER) == []


def test_a_server_with_workers_of_its_own_imports_no_cluster_no_bucket_and_no_tensors() -> None:
    assert loaded(OF_OTHERS, by=(*TO_START_A_WORKER, *THE_REST)) == []


def test_a_server_of_a_cluster_imports_no_bucket_no_postgresql_and_no_tensors() -> None:
    """A server that needs one of them imports it then."""
    watched = tuple(name for name in OF_OTHERS if name not in ("aiohttp", "kubernetes"))
    by = ("tinsmith_server.cli.serving", "tinsmith_server.fleet.kubernetes.fleet", *THE_REST)
    assert loaded(watched, by=by) == []
