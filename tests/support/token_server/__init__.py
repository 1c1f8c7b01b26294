"""Servers that answer as vLLM and SGLang do, on a CPU, with a tiny model and PEFT's own adapters.

What of the real ones is taken for granted is in `assumptions.toml`, each with where it is written.
"""
