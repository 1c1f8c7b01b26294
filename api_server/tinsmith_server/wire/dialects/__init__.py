"""OpenAI's and Anthropic's requests and answers, and the parts that both have in common."""
