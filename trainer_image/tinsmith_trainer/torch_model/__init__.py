"""The base model in torch. The PEFT engine and the built-in sampler of one process share the base model."""
