"""Sampling by a third-party server, vLLM or SGLang. The server is a child process, which loads adapters."""
