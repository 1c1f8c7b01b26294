"""The calls of OpenAI and Anthropic over HTTP."""
