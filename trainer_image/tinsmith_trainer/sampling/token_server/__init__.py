"""Sampling by a third-party server: vLLM or SGLang.

The server is a child process of the sampler, and loads adapters at runtime.
"""
