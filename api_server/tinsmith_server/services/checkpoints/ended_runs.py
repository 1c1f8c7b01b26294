"""Training runs that were never at work: each is there to have one checkpoint, which was not made by training here."""

from __future__ import annotations

from datetime import datetime

from tinsmith_server.services.accounts.audit import CheckpointEvent, of_new
from tinsmith_server.store.records import Checkpoint, Model, Session
from tinsmith_server.store.store import Store


def ended_session(
    session_id: str,
    tenant: str,
    now: datetime,
    *,
    tag: str,
    project_id: str | None,
    request_digest: str | None = None,
) -> Session:
    """A session that is finished when it begins."""
    return Session(
        session_id=session_id,
        tenant=tenant,
        created_at=now,
        last_heartbeat_at=now,
        tags=(tag,),
        project_id=project_id,
        finished_at=now,
        finish_type="success",
        request_digest=request_digest,
    )


async def add_ended_run(
    store: Store, session_id: str, checkpoint: Checkpoint, *, event: CheckpointEvent, worker_id: str = ""
) -> None:
    """A released model of a session that is in the store, and its checkpoint. What is there already stays as it is."""
    await store.add_model(_model(session_id, checkpoint, worker_id))
    await store.put_checkpoint(checkpoint, of_new(checkpoint, event))


def _model(session_id: str, checkpoint: Checkpoint, worker_id: str) -> Model:
    return Model(
        model_id=checkpoint.run_id,
        session_id=session_id,
        model_seq_id=0,
        tenant=checkpoint.tenant,
        base_model=checkpoint.base_model,
        worker_id=worker_id,
        state="released",
        create_kind="load",
        create_payload=b"",
        lora_rank=checkpoint.lora_rank,
        lora_alpha=checkpoint.lora_alpha,
        train_attn=checkpoint.train_attn,
        train_mlp=checkpoint.train_mlp,
        train_unembed=checkpoint.train_unembed,
        optimizer={"type": "adamw"},
        user_metadata=None,
        created_at=checkpoint.created_at,
        last_request_at=checkpoint.created_at,
    )
