"""The API server, which maps the Tinker protocol to RPCs of workers."""
