"""One rank's part of a model in Megatron, without NeMo RL and Ray: base weights, LoRA, train step, optimizer state."""
