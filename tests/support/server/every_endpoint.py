"""The requests for the whole API: its document, the fields in it that name something, and named things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.engine.graphs import node, ref, written
from support.server.attacked_server import MODEL, Tenant
from support.server.fake_fleet import FakeFleet
from support.server.http_server import settings_for
from tinsmith_server.app import create_app

# What an id is called, and how it follows from that of its session.
IDS = {
    "session_id": "{session}",
    "model_id": "{session}:train:0",
    "run_id": "{session}:train:0",
    "sampling_session_id": "{session}:sample:0",
    "request_id": "{session}:train:0:op:1",
    "tinker_path": "tinker://{session}:train:0/weights/saved",
    "path": "tinker://{session}:train:0/weights/saved",
    "source_path": "tinker://{session}:train:0/weights/saved",
    "model_path": "tinker://{session}:train:0/sampler_weights/saved",
}
OTHERS: dict[str, Any] = {
    "sdk_version": "0",
    "reason": {"type": "success"},
    "base_model": MODEL,
    "optimizer": False,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "forward_input": {"data": [], "loss_fn": "cross_entropy"},
    "ttl_seconds": 7200,
    "sampling_session_seq_id": 5,
    "name": "saved",
    "kind": "weights",
    "path": "new-name",
    "sessions": [],
    "project_id": "project",
    "custom_loss_seq_id": 0,
    "recording_id": "rec-0",
    "key_id": "1",
    "tenant": "victim",
    "metrics": [{"step": 1, "values": {"loss": 0.5}}],
    **written(node("loss", "sum", ref("logprobs"), op="call_method")),
}


def document(folder: Path) -> dict[str, Any]:
    fleet = FakeFleet()
    try:
        return create_app(settings_for(folder), fleet).openapi()
    finally:
        fleet.cleanup()


async def furnished(tenant: Tenant) -> str:
    """Make a session with a model, a sampler and a checkpoint of each kind, named as in `IDS`."""
    session = await tenant.session()
    model = await tenant.model(session)
    await tenant.sampler(session)
    for number, (path, name) in enumerate([("/save_weights", "saved"), ("/save_weights_for_sampler", "saved")]):
        body = {"model_id": model, "seq_id": number + 1, "path": name}
        made = (await tenant.post(path, body)).raise_for_status().json()
        (await tenant.post("/retrieve_future", {"request_id": made["request_id"]})).raise_for_status()
    return session
