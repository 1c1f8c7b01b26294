"""A caller waits for a connection as long as its own timeout says, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.certificates import CLIENT, Authority, mount_secret
from support.server.empty_stores import with_schema
from support.server.operator_stand_in import API_SERVER_NAME, StandInWorker, spec_of
from testcluster.ports import free_port
from tinsmith_server.fleet.channels import TlsDirectory
from tinsmith_server.fleet.kubernetes.session_handle import SessionHandle
from tinsmith_server.fleet.kubernetes.training_session import parse_session
from tinsmith_server.fleet.kubernetes.waking import Waker
from tinsmith_server.store.store import open_store

WORKER = "6f1c"
CRASHES = 60
PATIENCE_SECONDS = 20.0


async def refuse(*request: object) -> None:
    raise AssertionError(f"a running session was woken: {request}")


@pytest.fixture
async def worker() -> AsyncIterator[StandInWorker]:
    worker = StandInWorker(WORKER, Authority(), free_port())
    await worker.start()
    yield worker
    await worker.stop()


@pytest.fixture
async def handle(worker: StandInWorker, tmp_path: Path) -> AsyncIterator[SessionHandle]:
    mount_secret(tmp_path / "tls", worker.authority.leaf(API_SERVER_NAME, usages=(CLIENT,)), worker.authority)
    ready = {"type": "Ready", "status": "True", "message": "The worker answers."}
    status = {"workerId": WORKER, "endpoint": f"127.0.0.1:{worker.port}", "conditions": [ready]}
    session = parse_session({"metadata": {"name": "tiny", "namespace": "team"}, "spec": spec_of(), "status": status})
    store = await open_store(with_schema(f"sqlite:///{tmp_path / 'store.db'}"))
    handle = SessionHandle(WORKER, session, TlsDirectory(tmp_path / "tls"), store, "a-cluster", Waker(refuse))
    yield handle
    await handle.close()
    await store.close()


async def test_a_connection_lost_before_the_one_who_waits_comes_to_run_is_waited_for_again(
    handle: SessionHandle, worker: StandInWorker
) -> None:
    # Each crash is a chance that a connection opens and breaks between two steps of the waiting task.
    for _ in range(CRASHES):
        await handle.connection(PATIENCE_SECONDS)
        await worker.crash()
