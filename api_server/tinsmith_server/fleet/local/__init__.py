"""Workers as child processes of this server."""
