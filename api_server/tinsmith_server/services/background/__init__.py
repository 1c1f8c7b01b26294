"""Background tasks, and the state of this replica and its workers."""
