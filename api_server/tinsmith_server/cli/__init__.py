"""The server's commands, found by the `tinsmith` program under the entry-point group `tinsmith.commands`."""
