"""The nemo-rl engine: one model over many ranks, by Megatron; in this process, or as Ray actors."""
