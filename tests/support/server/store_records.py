"""Rows for store tests, each field with a plain value, the ones that matter given by name."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from tinsmith_server.store.records import Checkpoint, CheckpointType, Model, SamplingSession, Session

NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)


def later(seconds: float) -> datetime:
    """`seconds` after NOW."""
    return NOW + timedelta(seconds=seconds)


def a_session(session_id: str = "session-1", **fields: Any) -> Session:
    return Session(**{"session_id": session_id, "tenant": "ada", "created_at": NOW, "last_heartbeat_at": NOW, **fields})


def a_model(session_id: str = "session-1", model_seq_id: int = 0, **fields: Any) -> Model:
    plain: dict[str, Any] = {
        "model_id": f"{session_id}:train:{model_seq_id}",
        "session_id": session_id,
        "model_seq_id": model_seq_id,
        "tenant": "ada",
        "base_model": "Qwen/Qwen3-0.6B",
        "worker_id": "worker-1",
        "state": "accepted",
        "create_kind": "create",
        "create_payload": b"\x00payload\xff",
        "lora_rank": 8,
        "lora_alpha": 32.0,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": False,
        "optimizer": {"type": "adamw"},
        "user_metadata": None,
        "created_at": NOW,
        "last_request_at": NOW,
    }
    return Model(**{**plain, **fields})


def a_sampling_session(session_id: str = "session-1", seq_id: int = 0, **fields: Any) -> SamplingSession:
    plain: dict[str, Any] = {
        "sampling_session_id": f"{session_id}:sample:{seq_id}",
        "session_id": session_id,
        "sampling_session_seq_id": seq_id,
        "tenant": "ada",
        "base_model": "Qwen/Qwen3-0.6B",
        "created_at": NOW,
    }
    return SamplingSession(**{**plain, **fields})


def a_checkpoint(
    name: str = "first", type: CheckpointType = "training", *, epoch: int = 1, event_id: int = 1, **fields: Any
) -> Checkpoint:
    run_id = fields.pop("run_id", "session-1:train:0")
    plain: dict[str, Any] = {
        "run_id": run_id,
        "type": type,
        "name": name,
        "tenant": "ada",
        "base_model": "Qwen/Qwen3-0.6B",
        "directory": f"{run_id}/{type}/{event_id}-{epoch}",
        "manifest_digest": "0123abcd",
        "size_bytes": 4096,
        "epoch": epoch,
        "event_id": event_id,
        "seq_id": event_id,
        "lora_rank": 8,
        "lora_alpha": 32.0,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": False,
        "created_at": NOW,
    }
    return Checkpoint(**{**plain, **fields})
