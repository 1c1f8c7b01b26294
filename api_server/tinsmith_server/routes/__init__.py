"""The HTTP layer. A route parses the request, calls one service, and translates the answer. Each area has one file."""
