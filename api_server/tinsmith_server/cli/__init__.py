"""The server's commands. The `tinsmith` program finds them under the entry-point group `tinsmith.commands`."""
