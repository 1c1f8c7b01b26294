"""The worker: one base model, its adapters, and the journal of accepted operations."""
