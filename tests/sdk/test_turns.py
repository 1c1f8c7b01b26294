"""Two tenants on one worker, through all of it: an operation of the one's gives way to the other's."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.client.sdk import next_token_datum, service_client
from support.engine.gated import COMPUTING, FOLDER_VARIABLE, reached
from support.engine.reference import MICROBATCH_DATUMS
from support.server.serve_process import REFERENCE_MODEL, ServedInstallation
from support.waiting import until
from tinsmith.local_server import tinsmith_command

MICROBATCHES = 4
DATUM = next_token_datum((5, 2, 6))


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "gates"
    folder.mkdir()
    os.mkfifo(folder / COMPUTING)
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    return folder


@pytest.fixture
def server(tmp_path: Path, gates: Path) -> Iterator[ServedInstallation]:
    """Its engine stands before each microbatch until somebody lets it go on."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    settings = {"engine": "support.engine.gated:build_gated"}
    installation = ServedInstallation(tmp_path / "data", {REFERENCE_MODEL: model}, settings).start()
    yield installation
    installation.stop()


def key_of_another_tenant(server: ServedInstallation) -> str:
    command = [*tinsmith_command(), "keys", "create", "theirs", "--tenant=other", f"--data={server.data}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def queued(server: ServedInstallation) -> float:
    """0 also where the server has not asked its worker yet."""
    found = re.search(r"^tinsmith_queue_depth{.*} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def let_one_go(gate: Path) -> None:
    """The next microbatch that stands there goes on."""
    until(reached(gate).exists)
    reached(gate).unlink()
    gate.write_bytes(b"")


def test_a_forward_of_another_tenant_waits_for_one_microbatch_of_a_large_operation(
    server: ServedInstallation, gates: Path
) -> None:
    gate = gates / COMPUTING
    key = key_of_another_tenant(server)
    with service_client(server) as ours, service_client(server, api_key=key) as theirs:
        busy = ours.create_lora_training_client(REFERENCE_MODEL, rank=4).result()
        other = theirs.create_lora_training_client(REFERENCE_MODEL, rank=4).result()
        large = busy.forward_backward([DATUM] * MICROBATCHES * MICROBATCH_DATUMS, "cross_entropy")
        until(reached(gate).exists)
        small = other.forward([DATUM], "cross_entropy")
        until(lambda: queued(server) == 2)
        let_one_go(gate)  # the first of the large operation
        let_one_go(gate)
        assert len(small.result(timeout=60).loss_fn_outputs) == 1
        assert not large.future().done()
        for _ in range(MICROBATCHES - 1):
            let_one_go(gate)
        assert len(large.result(timeout=60).loss_fn_outputs) == MICROBATCHES * MICROBATCH_DATUMS
