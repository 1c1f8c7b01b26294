"""The queries of the store, one class for each group of tables."""
