"""The server dies between a checkpoint's files and its pointer in the store: the name appears all the same."""

from __future__ import annotations

import time

from support.server.serve_process import REFERENCE_MODEL, ServedInstallation

PATIENCE_SECONDS = 60.0


def new_model(server: ServedInstallation) -> str:
    session = server.post("/api/v1/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"}).json()
    create = {
        "session_id": session["session_id"],
        "model_seq_id": 0,
        "base_model": REFERENCE_MODEL,
        "lora_config": {"rank": 4},
    }
    request_id = server.post("/api/v1/create_model", create).json()["request_id"]
    model_id: str = server.retrieve(request_id).json()["model_id"]
    return model_id


def wait_for_files(server: ServedInstallation) -> None:
    """Wait until the worker has written the manifest, which it does last."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not list(server.data.glob("checkpoints/weights/*/*/manifest.json")):
        assert time.monotonic() < deadline, "the checkpoint's files never came"
        time.sleep(0.005)


def names(server: ServedInstallation, run: str) -> list[str]:
    listed = server.get(f"/api/v1/training_runs/{run}/checkpoints").json()["checkpoints"]
    return [checkpoint["checkpoint_id"] for checkpoint in listed]


def test_a_checkpoint_is_listed_although_no_client_fetched_its_result(reference_server: ServedInstallation) -> None:
    server = reference_server
    run = new_model(server)
    server.post("/api/v1/save_weights", {"model_id": run, "path": "a", "seq_id": 1, "overwrite": False})
    wait_for_files(server)
    server.kill()
    server.start()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while names(server, run) != ["weights/a"]:
        assert time.monotonic() < deadline, "the pointer never moved"
        time.sleep(0.05)
    saved = server.retrieve(f"{run}:op:1").json()
    assert saved["path"] == f"tinker://{run}/weights/a"
    assert names(server, run) == ["weights/a"], "one save, one name"


def test_no_other_user_of_the_machine_reads_journals_and_checkpoints(reference_server: ServedInstallation) -> None:
    run = new_model(reference_server)
    reference_server.post("/api/v1/save_weights", {"model_id": run, "path": "a", "seq_id": 1, "overwrite": False})
    wait_for_files(reference_server)
    data = reference_server.data
    folders = [data, *(path for path in data.rglob("*") if path.is_dir())]
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}
    assert {oct(file.stat().st_mode & 0o077) for file in data.rglob("*.sqlite*")} == {"0o0"}
