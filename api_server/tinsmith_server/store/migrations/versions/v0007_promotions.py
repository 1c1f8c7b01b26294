"""Names that stand for saved samplers, and what each stood for before."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.create_table(
        "promotions",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("tinker_path", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("before", sa.BigInteger()),
        sa.Column("is_rollback", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", "number", name="pk_promotions"),
    )
    op.create_index("ix_promotions_tenant_tinker_path", "promotions", ["tenant", "tinker_path"])
