"""The messages between the server and the workers, and Tinker's own protobuf messages."""

RELEASE_SEQ_ID = 2**62
"""The sequence number of a model's last operation, above the numbers of all others."""

PLAIN_SEQ_IDS = 2**61
"""The numbers above this one are those of calls that a client sends without a number."""

HIGHEST_CLIENT_SEQ_ID = 2**60
"""The highest sequence number that a client can send with an operation."""

CUSTOM_LOSS = "custom"
"""The loss name in calls that use a custom loss.

A worker that supports custom losses lists this name among its losses.
"""

TENANT_METADATA = "tinsmith-tenant-bin"
"""The gRPC metadata of Submit and Sample with the tenant's name in UTF-8, for fair scheduling.

The tenant is not a field of the request, because it changes only the order of the work.
"""

SHARE_WEIGHT_METADATA = "tinsmith-share-weight"
"""The gRPC metadata of Submit with the weight of the tenant's share of the engine, as a decimal number.

Without this metadata, the weight is 1. A worker that does not know this metadata gives all tenants equal shares.
"""

SAMPLES_OF_A_CLIENT = 10**9
"""The number of different sample numbers that one client can use.

The range of the n-th client of a sampling session starts at n times this number.
"""
