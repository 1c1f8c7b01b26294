"""Messages that the server and the workers exchange, and Tinker's own protobuf messages."""

RELEASE_SEQ_ID = 2**62
"""The sequence number of a model's last operation, above all that a client can send."""
