"""A call's datums as batches of tensors over ranks, and the ranks' results back to datums."""
