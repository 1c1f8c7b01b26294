"""Sampling by a third-party server, vLLM or SGLang. It is a child process, into which adapters are loaded."""
