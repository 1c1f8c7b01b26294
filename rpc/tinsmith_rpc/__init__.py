"""Messages that the server and the workers exchange, and Tinker's own protobuf messages."""

RELEASE_SEQ_ID = 2**62
"""The sequence number of a model's last operation, above all that a client can send."""

CUSTOM_LOSS = "custom"
"""The loss of calls that name one of `custom_losses`, among those that a worker says it has."""

TENANT_METADATA = "tinsmith-tenant-bin"
"""The gRPC metadata of Submit and Sample that says, in UTF-8, for whom it is: who takes turns with whom.

No field of a request, since a worker that does not know it does the same work, in another order.
"""

SAMPLES_OF_A_CLIENT = 10**9
"""The SDK numbers the samples of a sampling session's n-th client from n times as many on."""
