"""The schema. A change here needs a migration. A contract test compares the schema with the migrations.

A column has the same name as the field of the record (`records.py`), and rows are converted to records by these names.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    text,
)

from tinsmith_server.store.columns import Int64, JsonObject, JsonStrings, PlainText, UtcTime

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

# SQLite assigns row numbers only in a column declared INTEGER, which has 64 bits there.
_RowNumber = BigInteger().with_variant(Integer, "sqlite")

api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", _RowNumber, primary_key=True),
    Column("tenant", PlainText, nullable=False),
    Column("name", PlainText, nullable=False),
    Column("prefix", PlainText, nullable=False),
    Column("key_hash", PlainText, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("revoked_at", UtcTime),
    Column("role", PlainText, nullable=False),
    # This constraint is for two replicas that start with the same static key.
    UniqueConstraint("key_hash"),
)

ended_logins = Table(
    "ended_logins",
    metadata,
    # A login of the console that ended by a logout. Its tokens would otherwise be valid until they expire.
    Column("login_id", PlainText, primary_key=True),
    Column("expires_at", UtcTime, nullable=False),
)

tenant_limits = Table(
    "tenant_limits",
    metadata,
    Column("tenant", PlainText, primary_key=True),
    Column("adapters", Int64),
    Column("queued_operations", Int64),
    Column("requests_per_second", Double),
    Column("checkpoint_bytes", Int64),
    Column("checkpoints_kept", Int64),
    Column("share_weight", Double),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", PlainText, primary_key=True),
    Column("tenant", PlainText, nullable=False),
    Column("idempotency_key", PlainText),
    Column("created_at", UtcTime, nullable=False),
    Column("last_heartbeat_at", UtcTime, nullable=False),
    Column("tags", JsonStrings, nullable=False),
    Column("user_metadata", JsonObject, nullable=False),
    Column("sdk_version", PlainText, nullable=False),
    Column("project_id", PlainText),
    Column("display_name", PlainText),
    Column("finished_at", UtcTime),
    Column("finish_type", PlainText),
    Column("finish_detail", PlainText),
    # This digest distinguishes a repeated request from another request with the same idempotency key.
    Column("request_digest", PlainText),
    Column("key_id", Int64),
    # This constraint is for a create_session that the SDK repeats while the first is still running, perhaps at another
    # replica.
    UniqueConstraint("tenant", "idempotency_key"),
    Index(None, "tenant", "created_at"),
    Index(None, "finished_at", "last_heartbeat_at"),
)

models = Table(
    "models",
    metadata,
    Column("model_id", PlainText, primary_key=True),
    Column("session_id", PlainText, ForeignKey("sessions.session_id"), nullable=False),
    Column("model_seq_id", Int64, nullable=False),
    Column("tenant", PlainText, nullable=False),
    Column("base_model", PlainText, nullable=False),
    Column("worker_id", PlainText, nullable=False),
    Column("state", PlainText, nullable=False),
    Column("create_kind", PlainText, nullable=False),
    Column("create_payload", LargeBinary, nullable=False),
    Column("lora_rank", Int64, nullable=False),
    Column("lora_alpha", Double, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("optimizer", JsonObject, nullable=False),
    Column("user_metadata", JsonObject),
    Column("created_at", UtcTime, nullable=False),
    Column("last_request_at", UtcTime, nullable=False),
    Column("failure", PlainText),
    # This constraint is for a create_model that the SDK repeats while the first is still running. Only one adapter is
    # created.
    UniqueConstraint("session_id", "model_seq_id"),
    Index(None, "tenant", "created_at"),
    Index(None, "worker_id", "state"),
    Index(None, "state", "created_at"),
)

placements = Table(
    "placements",
    metadata,
    # This constraint is for two replicas that assign slots of the same worker. A slot has one model.
    Column("worker_id", PlainText, nullable=False),
    Column("slot", Int64, nullable=False),
    Column("model_id", PlainText, ForeignKey("models.model_id"), nullable=False),
    PrimaryKeyConstraint("worker_id", "slot"),
    # This constraint is for two replicas that place the same model at two workers. The first placement stays.
    UniqueConstraint("model_id"),
)

deferred_operations = Table(
    "deferred_operations",
    metadata,
    Column("model_id", PlainText, ForeignKey("models.model_id"), nullable=False),
    Column("seq_id", Int64, nullable=False),
    Column("tenant", PlainText, nullable=False),
    Column("size_bytes", Int64, nullable=False),
    Column("request", LargeBinary, nullable=False),
    # This constraint is for an operation that the SDK repeats, perhaps at another replica.
    PrimaryKeyConstraint("model_id", "seq_id"),
    Index(None, "tenant"),
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", PlainText, primary_key=True),
    Column("epoch", Int64, nullable=False),
    Column("instance_id", PlainText, nullable=False),
    Column("event_cursor", Int64, nullable=False),
    Column("home", PlainText, nullable=False),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("sampling_session_id", PlainText, primary_key=True),
    Column("session_id", PlainText, ForeignKey("sessions.session_id"), nullable=False),
    Column("sampling_session_seq_id", Int64, nullable=False),
    Column("tenant", PlainText, nullable=False),
    Column("base_model", PlainText, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("model_path", PlainText),
    Column("model_id", PlainText),
    Column("inflight", Boolean, nullable=False),
    Column("checkpoint_directory", PlainText),
    Column("manifest_digest", PlainText),
    # The number of clients that joined later; NULL if there are none.
    Column("clients", Int64),
    # This constraint is for a repeated create_sampling_session, and for an ephemeral save that two replicas see. The
    # number identifies the request.
    UniqueConstraint("session_id", "sampling_session_seq_id"),
    Index(None, "model_id", "sampling_session_seq_id"),
)

# The values are written into the text, not passed as parameters. A database uses a partial index only if it can read
# the condition in the statement.
UNNAMED = text("type = 'ephemeral' AND deleted_at IS NULL")
TOMBSTONE = text("deleted_at IS NOT NULL")

checkpoints = Table(
    "checkpoints",
    metadata,
    Column("run_id", PlainText, nullable=False),
    Column("type", PlainText, nullable=False),
    Column("name", PlainText, nullable=False),
    Column("tenant", PlainText, nullable=False),
    Column("base_model", PlainText, nullable=False),
    Column("directory", PlainText, nullable=False),
    Column("manifest_digest", PlainText, nullable=False),
    Column("size_bytes", Int64, nullable=False),
    Column("epoch", Int64, nullable=False),
    Column("event_id", Int64, nullable=False),
    Column("seq_id", Int64, nullable=False),
    Column("lora_rank", Int64, nullable=False),
    Column("lora_alpha", Double, nullable=False),
    Column("train_attn", Boolean, nullable=False),
    Column("train_mlp", Boolean, nullable=False),
    Column("train_unembed", Boolean, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime),
    Column("public", Boolean, nullable=False),
    Column("user_metadata", JsonObject),
    # This makes the row a tombstone. It keeps the deleted checkpoint's epoch and event_id, so that a replayed event
    # counts as old.
    Column("deleted_at", UtcTime),
    # This constraint is for two replicas that drain the same worker's events. Each name has one row, and (epoch,
    # event_id) orders the writes.
    PrimaryKeyConstraint("run_id", "type", "name"),
    Index(None, "tenant", "created_at"),
    Index(None, "expires_at"),
    # Each unnamed save searches this index. All but the newest few rows are tombstones.
    Index("ix_checkpoints_unnamed", "tenant", "created_at", sqlite_where=UNNAMED, postgresql_where=UNNAMED),
    Index("ix_checkpoints_tombstones", "deleted_at", sqlite_where=TOMBSTONE, postgresql_where=TOMBSTONE),
)

usage = Table(
    "usage",
    metadata,
    Column("tenant", PlainText, nullable=False),
    Column("hour", UtcTime, nullable=False),
    Column("session_id", PlainText, nullable=False),
    Column("base_model", PlainText, nullable=False),
    Column("kind", PlainText, nullable=False),
    Column("amount", Int64, nullable=False),
    # This constraint is for two replicas that count at the same time. Both add to one row.
    PrimaryKeyConstraint("tenant", "hour", "session_id", "base_model", "kind"),
    Index(None, "hour"),
)

audit = Table(
    "audit",
    metadata,
    Column("entry_id", _RowNumber, primary_key=True),
    Column("tenant", PlainText, nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("event", PlainText, nullable=False),
    Column("model_id", PlainText, nullable=False),
    Column("tinker_path", PlainText, nullable=False),
    Column("details", JsonObject, nullable=False),
    Index(None, "tenant", "at"),
    Index(None, "at"),
)

promotions = Table(
    "promotions",
    metadata,
    Column("tenant", PlainText, nullable=False),
    Column("name", PlainText, nullable=False),
    Column("number", Int64, nullable=False),
    Column("tinker_path", PlainText, nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("before", Int64),
    Column("is_rollback", Boolean, nullable=False),
    # This constraint is for two concurrent changes of a name, perhaps at two replicas. The second change fails and
    # reads again.
    PrimaryKeyConstraint("tenant", "name", "number"),
    Index(None, "tenant", "tinker_path"),
)

recordings = Table(
    "recordings",
    metadata,
    Column("recording_id", PlainText, primary_key=True),
    Column("tenant", PlainText, nullable=False),
    Column("model", PlainText, nullable=False),
    Column("created_at", UtcTime, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
    Column("most_turns", Int64, nullable=False),
    Column("most_bytes", Int64, nullable=False),
    Column("turns", Int64, nullable=False),
    Column("size_bytes", Int64, nullable=False),
    Index(None, "tenant", "created_at"),
    Index(None, "expires_at"),
)

recorded_turns = Table(
    "recorded_turns",
    metadata,
    Column("recording_id", PlainText, ForeignKey("recordings.recording_id"), nullable=False),
    Column("number", Int64, nullable=False),
    Column("parent", Int64),
    Column("reason", PlainText, nullable=False),
    Column("model_path", PlainText, nullable=False),
    Column("weights_digest", PlainText, nullable=False),
    Column("finish_reason", PlainText, nullable=False),
    Column("sampling", JsonObject, nullable=False),
    Column("started_at", UtcTime, nullable=False),
    Column("ended_at", UtcTime, nullable=False),
    Column("settings_digest", LargeBinary, nullable=False),
    Column("message_digests", LargeBinary, nullable=False),
    # Text of a model may contain NUL, which no text column can hold on PostgreSQL.
    Column("reasoning", LargeBinary, nullable=False),
    Column("prompt_tokens", LargeBinary, nullable=False),
    Column("sampled_tokens", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary, nullable=False),
    # The row of the recording assigns the numbers, so two replicas never use the same number.
    PrimaryKeyConstraint("recording_id", "number"),
)

run_steps = Table(
    "run_steps",
    metadata,
    Column("run_id", PlainText, ForeignKey("models.model_id"), nullable=False),
    Column("position", Int64, nullable=False),
    Column("step", Int64, nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("tokens", Int64, nullable=False),
    Column("steps", Int64, nullable=False),
    Column("loss", Double),
    Column("grad_norm", Double),
    Column("learning_rate", Double),
    Column("seconds", Double),
    Column("sampler_gap", Double),
    PrimaryKeyConstraint("run_id", "position"),
)

run_reports = Table(
    "run_reports",
    metadata,
    Column("run_id", PlainText, ForeignKey("models.model_id"), nullable=False),
    Column("step", Int64, nullable=False),
    Column("revision", Int64, nullable=False),
    Column("at", UtcTime, nullable=False),
    Column("values", JsonObject, nullable=False),
    PrimaryKeyConstraint("run_id", "step"),
    UniqueConstraint("run_id", "revision"),
)

run_progress = Table(
    "run_progress",
    metadata,
    # Each change of a series locks this row first, so that two replicas do not add a step twice.
    Column("run_id", PlainText, ForeignKey("models.model_id"), primary_key=True),
    Column("position", Int64, nullable=False),
    Column("step", Int64, nullable=False),
    Column("at", UtcTime),
    Column("loss", Double),
    Column("tokens_per_second", Double),
    Column("seconds_per_step", Double),
    Column("recent_losses", LargeBinary, nullable=False),
    Column("total_steps", Int64),
    Column("unfolded", Int64, nullable=False),
    Column("revision", Int64, nullable=False),
    Column("reports", Int64, nullable=False),
    Column("report_bytes", Int64, nullable=False),
)

garbage = Table(
    "garbage",
    metadata,
    Column("garbage_id", _RowNumber, primary_key=True),
    Column("directory", PlainText, nullable=False),
    # This time is set while a copy or an import writes the directory. If a crash prevents the record, the files are
    # removed after this time.
    Column("due_at", UtcTime),
    # This constraint makes a directory that is reported twice be deleted once.
    UniqueConstraint("directory"),
)

secrets = Table(
    "secrets",
    metadata,
    # This constraint is for two replicas that draw the same secret at their first start. The first row stays, and both
    # read it.
    Column("name", PlainText, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

leases = Table(
    "leases",
    metadata,
    # This constraint is for two replicas that take the same lease. One statement changes the owner in the only row.
    Column("name", PlainText, primary_key=True),
    Column("owner", PlainText, nullable=False),
    Column("expires_at", UtcTime, nullable=False),
)

replicas = Table(
    "replicas",
    metadata,
    # Each server writes its own row, and computes its share of the tasks from the number of rows.
    Column("replica", PlainText, primary_key=True),
    Column("expires_at", UtcTime, nullable=False),
)

rounds = Table(
    "rounds",
    metadata,
    # Any replica that runs a round records it here, so that a replica that dies leaves no gap.
    Column("name", PlainText, primary_key=True),
    Column("since", UtcTime, nullable=False),
    Column("last_at", UtcTime, nullable=False),
)
