"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_TIME = sa.DateTime(timezone=True)
_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _keys_and_sessions()
    _models_and_workers()
    _run_series()
    _sampling_sessions()
    _checkpoints_and_promotions()
    _recordings()
    _accounts()
    _installation()


def _keys_and_sessions() -> None:
    op.create_table(
        "api_keys",
        sa.Column("key_id", _ROW_NUMBER, nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("revoked_at", _TIME),
        sa.Column("role", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
        sa.UniqueConstraint("key_hash", name="uq_api_keys_key_hash"),
    )
    op.create_table(
        "ended_logins",
        sa.Column("login_id", sa.Text(), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("login_id", name="pk_ended_logins"),
    )
    op.create_table(
        "tenant_limits",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("adapters", sa.BigInteger()),
        sa.Column("queued_operations", sa.BigInteger()),
        sa.Column("requests_per_second", sa.Double()),
        sa.Column("checkpoint_bytes", sa.BigInteger()),
        sa.Column("checkpoints_kept", sa.BigInteger()),
        sa.Column("share_weight", sa.Double()),
        sa.PrimaryKeyConstraint("tenant", name="pk_tenant_limits"),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("idempotency_key", sa.Text()),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("last_heartbeat_at", _TIME, nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.Text(), nullable=False),
        sa.Column("project_id", sa.Text()),
        sa.Column("display_name", sa.Text()),
        sa.Column("finished_at", _TIME),
        sa.Column("finish_type", sa.Text()),
        sa.Column("finish_detail", sa.Text()),
        sa.Column("request_digest", sa.Text()),
        sa.Column("key_id", sa.BigInteger()),
        sa.PrimaryKeyConstraint("session_id", name="pk_sessions"),
        sa.UniqueConstraint("tenant", "idempotency_key", name="uq_sessions_tenant_idempotency_key"),
    )
    op.create_index("ix_sessions_tenant_created_at", "sessions", ["tenant", "created_at"])
    op.create_index("ix_sessions_finished_at_last_heartbeat_at", "sessions", ["finished_at", "last_heartbeat_at"])


def _models_and_workers() -> None:
    op.create_table(
        "models",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("model_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("create_kind", sa.Text(), nullable=False),
        sa.Column("create_payload", sa.LargeBinary(), nullable=False),
        sa.Column("lora_rank", sa.BigInteger(), nullable=False),
        sa.Column("lora_alpha", sa.Double(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("optimizer", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("last_request_at", _TIME, nullable=False),
        sa.Column("failure", sa.Text()),
        sa.PrimaryKeyConstraint("model_id", name="pk_models"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_models_session_id"),
        sa.UniqueConstraint("session_id", "model_seq_id", name="uq_models_session_id_model_seq_id"),
    )
    op.create_index("ix_models_tenant_created_at", "models", ["tenant", "created_at"])
    op.create_index("ix_models_worker_id_state", "models", ["worker_id", "state"])
    op.create_index("ix_models_state_created_at", "models", ["state", "created_at"])
    op.create_table(
        "placements",
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "slot", name="pk_placements"),
        sa.ForeignKeyConstraint(["model_id"], ["models.model_id"], name="fk_placements_model_id"),
        sa.UniqueConstraint("model_id", name="uq_placements_model_id"),
    )
    op.create_table(
        "deferred_operations",
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("model_id", "seq_id", name="pk_deferred_operations"),
        sa.ForeignKeyConstraint(["model_id"], ["models.model_id"], name="fk_deferred_operations_model_id"),
    )
    op.create_index("ix_deferred_operations_tenant", "deferred_operations", ["tenant"])
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("instance_id", sa.Text(), nullable=False),
        sa.Column("event_cursor", sa.BigInteger(), nullable=False),
        sa.Column("home", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", name="pk_workers"),
    )


def _run_series() -> None:
    op.create_table(
        "run_steps",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("loss", sa.Double()),
        sa.Column("grad_norm", sa.Double()),
        sa.Column("learning_rate", sa.Double()),
        sa.Column("seconds", sa.Double()),
        sa.Column("sampler_gap", sa.Double()),
        sa.PrimaryKeyConstraint("run_id", "position", name="pk_run_steps"),
        sa.ForeignKeyConstraint(["run_id"], ["models.model_id"], name="fk_run_steps_run_id"),
    )
    op.create_table(
        "run_reports",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "step", name="pk_run_reports"),
        sa.ForeignKeyConstraint(["run_id"], ["models.model_id"], name="fk_run_reports_run_id"),
        sa.UniqueConstraint("run_id", "revision", name="uq_run_reports_run_id_revision"),
    )
    op.create_table(
        "run_progress",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", _TIME),
        sa.Column("loss", sa.Double()),
        sa.Column("tokens_per_second", sa.Double()),
        sa.Column("seconds_per_step", sa.Double()),
        sa.Column("recent_losses", sa.LargeBinary(), nullable=False),
        sa.Column("total_steps", sa.BigInteger()),
        sa.Column("unfolded", sa.BigInteger(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("reports", sa.BigInteger(), nullable=False),
        sa.Column("report_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name="pk_run_progress"),
        sa.ForeignKeyConstraint(["run_id"], ["models.model_id"], name="fk_run_progress_run_id"),
    )


def _sampling_sessions() -> None:
    op.create_table(
        "sampling_sessions",
        sa.Column("sampling_session_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("sampling_session_seq_id", sa.BigInteger(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("model_path", sa.Text()),
        sa.Column("model_id", sa.Text()),
        sa.Column("inflight", sa.Boolean(), nullable=False),
        sa.Column("checkpoint_directory", sa.Text()),
        sa.Column("manifest_digest", sa.Text()),
        sa.Column("clients", sa.BigInteger()),
        sa.PrimaryKeyConstraint("sampling_session_id", name="pk_sampling_sessions"),
        sa.ForeignKeyConstraint(["session_id"], ["sessions.session_id"], name="fk_sampling_sessions_session_id"),
        sa.UniqueConstraint(
            "session_id", "sampling_session_seq_id", name="uq_sampling_sessions_session_id_sampling_session_seq_id"
        ),
    )
    op.create_index(
        "ix_sampling_sessions_model_id_sampling_session_seq_id",
        "sampling_sessions",
        ["model_id", "sampling_session_seq_id"],
    )


def _checkpoints_and_promotions() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("directory", sa.Text(), nullable=False),
        sa.Column("manifest_digest", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("event_id", sa.BigInteger(), nullable=False),
        sa.Column("seq_id", sa.BigInteger(), nullable=False),
        sa.Column("lora_rank", sa.BigInteger(), nullable=False),
        sa.Column("lora_alpha", sa.Double(), nullable=False),
        sa.Column("train_attn", sa.Boolean(), nullable=False),
        sa.Column("train_mlp", sa.Boolean(), nullable=False),
        sa.Column("train_unembed", sa.Boolean(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME),
        sa.Column("public", sa.Boolean(), nullable=False),
        sa.Column("user_metadata", sa.JSON()),
        sa.Column("deleted_at", _TIME),
        sa.PrimaryKeyConstraint("run_id", "type", "name", name="pk_checkpoints"),
    )
    op.create_index("ix_checkpoints_tenant_created_at", "checkpoints", ["tenant", "created_at"])
    op.create_index("ix_checkpoints_expires_at", "checkpoints", ["expires_at"])
    unnamed = sa.text("type = 'ephemeral' AND deleted_at IS NULL")
    tombstone = sa.text("deleted_at IS NOT NULL")
    op.create_index(
        "ix_checkpoints_unnamed",
        "checkpoints",
        ["tenant", "created_at"],
        sqlite_where=unnamed,
        postgresql_where=unnamed,
    )
    op.create_index(
        "ix_checkpoints_tombstones",
        "checkpoints",
        ["deleted_at"],
        sqlite_where=tombstone,
        postgresql_where=tombstone,
    )
    op.create_table(
        "promotions",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("tinker_path", sa.Text(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("before", sa.BigInteger()),
        sa.Column("is_rollback", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", "number", name="pk_promotions"),
    )
    op.create_index("ix_promotions_tenant_tinker_path", "promotions", ["tenant", "tinker_path"])


def _recordings() -> None:
    op.create_table(
        "recordings",
        sa.Column("recording_id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.Column("most_turns", sa.BigInteger(), nullable=False),
        sa.Column("most_bytes", sa.BigInteger(), nullable=False),
        sa.Column("turns", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("recording_id", name="pk_recordings"),
    )
    op.create_index("ix_recordings_tenant_created_at", "recordings", ["tenant", "created_at"])
    op.create_index("ix_recordings_expires_at", "recordings", ["expires_at"])
    op.create_table(
        "recorded_turns",
        sa.Column("recording_id", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("parent", sa.BigInteger()),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("model_path", sa.Text(), nullable=False),
        sa.Column("weights_digest", sa.Text(), nullable=False),
        sa.Column("finish_reason", sa.Text(), nullable=False),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("started_at", _TIME, nullable=False),
        sa.Column("ended_at", _TIME, nullable=False),
        sa.Column("settings_digest", sa.LargeBinary(), nullable=False),
        sa.Column("message_digests", sa.LargeBinary(), nullable=False),
        sa.Column("reasoning", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_tokens", sa.LargeBinary(), nullable=False),
        sa.Column("sampled_tokens", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("recording_id", "number", name="pk_recorded_turns"),
        sa.ForeignKeyConstraint(["recording_id"], ["recordings.recording_id"], name="fk_recorded_turns_recording_id"),
    )


def _accounts() -> None:
    op.create_table(
        "usage",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("hour", _TIME, nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("base_model", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "hour", "session_id", "base_model", "kind", name="pk_usage"),
    )
    op.create_index("ix_usage_hour", "usage", ["hour"])
    op.create_table(
        "audit",
        sa.Column("entry_id", _ROW_NUMBER, nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("model_id", sa.Text(), nullable=False),
        sa.Column("tinker_path", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("entry_id", name="pk_audit"),
    )
    op.create_index("ix_audit_tenant_at", "audit", ["tenant", "at"])
    op.create_index("ix_audit_at", "audit", ["at"])


def _installation() -> None:
    op.create_table(
        "garbage",
        sa.Column("garbage_id", _ROW_NUMBER, nullable=False),
        sa.Column("directory", sa.Text(), nullable=False),
        sa.Column("due_at", _TIME),
        sa.PrimaryKeyConstraint("garbage_id", name="pk_garbage"),
        sa.UniqueConstraint("directory", name="uq_garbage_directory"),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )
    op.create_table(
        "leases",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "replicas",
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("replica", name="pk_replicas"),
    )
    op.create_table(
        "rounds",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("since", _TIME, nullable=False),
        sa.Column("last_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_rounds"),
    )
