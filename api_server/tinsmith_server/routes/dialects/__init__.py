"""OpenAI's and Anthropic's calls over HTTP."""
