"""The limits on the memory of the parsers that read a tenant's bytes.

docs/reference/limits.md links here, and tests/attacks/test_parsers.py measures each parser.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
SERVER, WORKER = "API server", "worker"


@dataclass(frozen=True, slots=True)
class ParserMemory:
    """The limit of a parser: `times` bytes for each byte of input, plus `base_mib`."""

    where: str
    what: str
    bytes_at_most: str
    times: int
    base_mib: int

    def most_bytes(self, read_bytes: int) -> int:
        return self.times * read_bytes + self.base_mib * MIB


PARSERS = {
    "head": ParserMemory(SERVER, "the head of a training body, compressed or not", "`max_body_bytes`", 0, 66),
    "outline": ParserMemory(
        "both", "a training body, whose datums, tokens and fields are counted", "`max_body_bytes`", 0, 2
    ),
    "zstd": ParserMemory("both", "a zstd frame, of what it unpacks to", "`max_body_bytes`", 2, 2),
    "gunzip": ParserMemory(SERVER, "a gzip body, of what it unpacks to", "`max_body_bytes`", 3, 2),
    "json_training": ParserMemory(SERVER, "training data in JSON", "`max_body_bytes`", 14, 4),
    "json_object": ParserMemory(SERVER, "any other JSON body", "4 MiB", 6, 2),
    "telemetry": ParserMemory(SERVER, "telemetry", "1 MiB", 6, 4),
    "sample": ParserMemory(SERVER, "a sample", "`max_sample_bytes`", 7, 4),
    "conversation": ParserMemory(SERVER, "a completion, a conversation", "`max_sample_bytes`", 7, 4),
    "custom_loss": ParserMemory(SERVER, "the graph of a custom loss", "256 KiB", 16, 2),
    "token": ParserMemory(SERVER, "a token in a header", "32 KiB", 0, 8),
    "training_of_long_datums": ParserMemory(WORKER, "a training body of few large datums", "`max_body_bytes`", 4, 2),
    "training_of_short_datums": ParserMemory(WORKER, "one of 16,384 datums of a token", "`max_body_bytes`", 4, 24),
    "training_of_kinds": ParserMemory(WORKER, "one of 2,097,152 fields", "`max_body_bytes`", 4, 48),
    "sparse_tensor": ParserMemory(WORKER, "sparse tensors, of what they are as dense ones", "512 MiB", 2, 2),
    "loss_id": ParserMemory(WORKER, "the id of a custom loss", "32 KiB", 0, 12),
    "image": ParserMemory(WORKER, "the pixels of an image", "16 MiB", 0, 160),
    "sample_request": ParserMemory(WORKER, "a sample's tensor, of what it is as a dense one", "128 MiB", 2, 2),
    "adapter_files": ParserMemory(WORKER, "an adapter's weights", "as the base model's largest", 8, 2),
    "adapter_header": ParserMemory(WORKER, "their header", "512 for each tensor that may be, and 64 KiB", 10, 2),
    "adapter_config": ParserMemory(WORKER, "an adapter's configuration", "64 for each such tensor, and 1 MiB", 32, 2),
    "recipients": ParserMemory(WORKER, "recipients of an encrypted save", "256 KiB", 8, 2),
}
"""The limits, by the names in `tests/support/parsers/worst_inputs.py`."""
