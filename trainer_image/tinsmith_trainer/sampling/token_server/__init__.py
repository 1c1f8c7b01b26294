"""Sampling by somebody else's server, vLLM or SGLang: its process is our child, and adapters are loaded into it."""
