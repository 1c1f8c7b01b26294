"""OpenAI's and Anthropic's requests and answers, and what they have in common."""
