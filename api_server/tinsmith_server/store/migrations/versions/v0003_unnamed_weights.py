"""Indexes for unnamed weights that are kept, and for what is left of those that are not."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
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
