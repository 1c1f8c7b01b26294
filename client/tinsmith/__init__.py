"""The `tinsmith` command, and the demo that shows what the server does."""
