"""The base model in torch, shared by the PEFT engine and the built-in sampler of one process."""
