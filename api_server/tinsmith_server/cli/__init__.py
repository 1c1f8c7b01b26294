"""The server's commands. The `tinsmith` program finds the commands under the entry-point group `tinsmith.commands`."""
