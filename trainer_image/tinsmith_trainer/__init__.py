"""The worker: one base model, the adapters on it, and the journal of what it has accepted."""
