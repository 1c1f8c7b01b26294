"""Which request made a session, and directories that are being written until a record names them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("request_digest", sa.Text()))
    op.add_column("garbage", sa.Column("due_at", sa.DateTime(timezone=True)))
