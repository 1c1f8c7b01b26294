"""The server's commands, found by the `tinsmith` program under the entry-point group `tinsmith.commands`."""

from tinsmith_server.cli.key_commands import keys
from tinsmith_server.cli.serving import serve

__all__ = ["keys", "serve"]
