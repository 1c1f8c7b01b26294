"""Models at workers that counted for themselves hold places in the store, like all others."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.execute(
        """
        INSERT INTO placements (worker_id, slot, model_id)
        SELECT
            models.worker_id,
            COALESCE((SELECT MAX(slot) + 1 FROM placements WHERE placements.worker_id = models.worker_id), 0)
                + ROW_NUMBER() OVER (PARTITION BY models.worker_id ORDER BY models.created_at, models.model_id) - 1,
            models.model_id
        FROM models
        WHERE models.state IN ('accepted', 'bound') AND models.worker_id <> ''
            AND NOT EXISTS (SELECT 1 FROM placements WHERE placements.model_id = models.model_id)
        """
    )
