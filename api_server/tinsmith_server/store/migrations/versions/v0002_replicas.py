"""Which replicas there are, and since when their rounds have come without a gap."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
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
