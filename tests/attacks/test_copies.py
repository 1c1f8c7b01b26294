"""Copies that aim at another tenant's checkpoint: nothing that a key holder asks for changes files that are there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.server.http_server import TestedServer
from tinsmith_server.services.accounts.keys import hash_key

VICTIMS = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"the victim's weights"}
ATTACKERS = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"something else"}
KINDS = {
    "weights": "/save_weights",
    "sampler_weights": "/save_weights_for_sampler",
    "external_weights": "/save_weights_external",
}


async def headers_of(server: TestedServer, tenant: str) -> dict[str, str]:
    return {"X-API-Key": (await server.services.keys.create(tenant, "laptop")).secret}


async def save(
    server: TestedServer, kind: str, name: str, files: Mapping[str, bytes], headers: Mapping[str, str]
) -> str:
    """Save a checkpoint with these files under a new model of the tenant's, and return its path."""
    server.worker.saved_files = dict(files)
    session = (await server.post("/create_session", {"sdk_version": "0"}, headers=headers)).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "org/tiny"}
    made = (await server.post("/create_model", body, headers=headers)).json()
    await server.result(made["request_id"], headers=headers)
    model_id = f"{session}:train:0"
    saved = await server.post(KINDS[kind], {"model_id": model_id, "seq_id": 1, "path": name}, headers=headers)
    assert "error" not in (await server.result(saved.json()["request_id"], headers=headers)).json()
    return f"tinker://{model_id}/{kind}/{name}"


def content_of(server: TestedServer) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in server.newest_directory.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_second_copy_with_the_same_key_leaves_the_first_source_as_it_was(
    installation: TestedServer, kind: str
) -> None:
    """A copy on a disk is a link: what is written into it is written into the source."""
    server = installation
    victim, attacker = await headers_of(server, "victim"), await headers_of(server, "attacker")
    path = await save(server, kind, "good", VICTIMS, victim)
    run, kind_and_name = path.removeprefix("tinker://").split("/", 1)
    published = await server.post(f"/training_runs/{run}/checkpoints/{kind_and_name}/publish", headers=victim)
    assert published.status_code == 200
    directory, before = server.newest_directory, content_of(server)
    own = await save(server, kind, "bad", ATTACKERS, attacker)

    key = {**attacker, "X-Idempotency-Key": "once"}
    first = await server.post("/copy_weights", {"source_path": path}, headers=key)
    assert first.status_code == 200
    second = await server.post("/copy_weights", {"source_path": own}, headers=key)

    assert {file.name: file.read_bytes() for file in directory.iterdir()} == before
    assert (second.status_code, "another request" in second.json().get("detail", "")) == (422, True)


async def test_texts_that_read_the_same_together_make_two_copies(installation: TestedServer) -> None:
    """Tenant `a` with the key `b c`, and tenant `a b` with the key `c`: a name for both would be one for the two."""
    server = installation
    path = await save(server, "weights", "good", VICTIMS, await headers_of(server, "victim"))
    run = path.split("/")[2]
    owner = await headers_of(server, "victim")
    assert (await server.post(f"/training_runs/{run}/checkpoints/weights/good/publish", headers=owner)).is_success
    runs = set()
    for tenant, key in (("a", "b c"), ("a b", "c")):
        secret = f"tml-{tenant}"
        # No command makes a tenant with a space; a store may hold one.
        await server.services.keys._store.add_key(tenant, "", "tml-", hash_key(secret), server.time.now)
        headers = {"X-API-Key": secret, "X-Idempotency-Key": key}
        copied = (await server.post("/copy_weights", {"source_path": path}, headers=headers)).json()["tinker_path"]
        listed = (await server.client.get("/checkpoints", headers=headers)).json()["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [copied]
        runs.add(copied.split("/")[2])
    assert len(runs) == 2
