"""How many clients have joined a sampling session."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("sampling_sessions", sa.Column("clients", sa.BigInteger()))
