"""The entry point for Alembic. Alembic runs in the transaction that `store/migrate.py` has opened."""

from alembic import context
from tinsmith_server.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata)
context.run_migrations()
