"""Who used what in which hour, and what was done to checkpoints."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
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
        sa.Column("entry_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
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
