"""The store's areas, one class of queries each."""
