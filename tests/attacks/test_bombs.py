"""Training bodies of a few bytes that unpack to gigabytes, or to hours: refused by name, down to the worker.

A real server that counts their tokens, and a real worker, since both read them.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator

import httpx
import numpy as np
import pytest
import zstandard
from support.server.serve_process import (
    API_KEY,
    HTTP_OPTIONS,
    REFERENCE_ENGINE,
    REFERENCE_MODEL,
    ServedInstallation,
    highest_bytes,
)
from support.worker.messages import forward_backward, next_token_datum
from tinsmith_rpc import wire_pb2

GIB = 2**30
MIB = 2**20
PARTS = 64
MOST_MORE_BYTES_OF_THE_SERVER = 320 * MIB
"""A body of 64 MiB as it came, unpacked, and on its way to the worker."""
MOST_MORE_BYTES = GIB
"""The memory that one body may take of the worker: half of it is the limit of an unpacked body."""


class Victim:
    """One model on a worker, and the way to it."""

    def __init__(self, server: ServedInstallation) -> None:
        self.server = server
        session = server.post("/api/v1/create_session", {"tags": []}).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": REFERENCE_MODEL, "lora_config": {"rank": 4}}
        made = server.post("/api/v1/create_model", body).json()
        assert server.retrieve(made["request_id"]).status_code == 200
        self.model_id = made["model_id"]
        self.seq_id = 0

    def plain(self, *datums: wire_pb2.Datum) -> bytes:
        return forward_backward(datums, model_id=self.model_id, seq_id=self.seq_id)

    def send(self, build: Callable[[Victim], bytes], encoding: str) -> httpx.Response:
        """Send the body, and return the future's answer."""
        self.seq_id += 1
        headers = {"X-API-Key": API_KEY, "Content-Type": "application/x-protobuf", "Content-Encoding": encoding}
        url = f"{self.server.url}/api/v1/forward_backward"
        taken = httpx.post(url, content=build(self), headers=headers, **HTTP_OPTIONS)
        assert taken.status_code == 200, taken.text
        return self.server.retrieve(taken.json()["request_id"])

    @property
    def worker_pid(self) -> int:
        [pid] = self.server.worker_pids()
        return pid

    @property
    def highest_bytes(self) -> int:
        """Return the worker's peak memory in bytes."""
        return highest_bytes(self.worker_pid)

    @property
    def server_highest_bytes(self) -> int:
        assert self.server.process is not None
        return highest_bytes(self.server.process.pid)


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    model = tmp_path_factory.mktemp("reference")
    (model / "config.json").write_text("{}")
    data = tmp_path_factory.mktemp("bombed")
    settings = {"engine": REFERENCE_ENGINE, "trained_tokens_per_minute": str(10**9)}  # so that the server counts them
    server = ServedInstallation(data, {REFERENCE_MODEL: model}, settings).start()
    yield Victim(server)
    server.stop()


def body_with_zeros(victim: Victim) -> Iterator[bytes]:
    """Return the head of a body, and an unknown field of a gibibyte behind it."""
    yield victim.plain(next_token_datum([1, 2, 3]))
    yield b"\xfa\x07" + b"\x80\x80\x80\x80\x04"
    for _ in range(PARTS):
        yield bytes(GIB // PARTS)


def compressed(victim: Victim, declared_bytes: int | None) -> bytes:
    compressor = zstandard.ZstdCompressor()
    unpacked = compressor.compressobj() if declared_bytes is None else compressor.compressobj(size=declared_bytes)
    return b"".join(unpacked.compress(part) for part in body_with_zeros(victim)) + unpacked.flush()


def undeclared_zstd(victim: Victim) -> bytes:
    """Return a frame without its size."""
    return compressed(victim, None)


def declared_zstd(victim: Victim) -> bytes:
    return compressed(victim, sum(len(part) for part in body_with_zeros(victim)))


def gzipped(victim: Victim) -> bytes:
    """Compress equal parts once. The body has no end, which no reader reaches."""
    compressor = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)

    def flushed(part: bytes) -> bytes:
        return compressor.compress(part) + compressor.flush(zlib.Z_FULL_FLUSH)

    beginning, field, *zeros = itertools.islice(body_with_zeros(victim), 3)
    return flushed(beginning + field) + flushed(*zeros) * PARTS


def sparse(victim: Victim) -> bytes:
    datum = next_token_datum([1])
    weights = datum.loss_fn_inputs["weights"]
    weights.shape[:] = [1, 2**25]
    weights.sparse_csr.crow_indices = np.array([0, 0], "<i8").tobytes()
    return victim.plain(*[datum] * 200)


def of_many_dimensions(victim: Victim) -> bytes:
    datum = next_token_datum([1, 2])
    datum.loss_fn_inputs["weights"].shape[:] = [2**62] * 200_000
    return victim.plain(datum)


def of_empty_chunks(victim: Victim) -> bytes:
    datum = wire_pb2.Datum()
    datum.model_input.extend([wire_pb2.Chunk()] * 1_000_000)
    return victim.plain(datum)


def of_empty_datums(victim: Victim) -> bytes:
    return victim.plain(*[wire_pb2.Datum()] * 1_000_000)


def packed(victim: Victim, repeated: bytes, *, declared: bool = True, mebibytes: int = 63) -> bytes:
    """Return as many of them behind the head as fit in a body; the frame is some kilobytes."""
    body = victim.plain() + repeated * (mebibytes * MIB // len(repeated))
    compressor = zstandard.ZstdCompressor()
    unpacked = compressor.compressobj(size=len(body)) if declared else compressor.compressobj()
    return unpacked.compress(body) + unpacked.flush()


def of_packed_datums(victim: Victim) -> bytes:
    return packed(victim, b"\x1a\0")


def of_more_packed_datums_than_a_body_holds(victim: Victim) -> bytes:
    return packed(victim, b"\x1a\0", declared=False, mebibytes=512)


def of_packed_kinds_of_a_chunk(victim: Victim) -> bytes:
    """Each takes the place of the one before it, whose memory is not given back."""
    return packed(victim, b"\x1a\x83\x7d" + b"\x0a\x80\x7d" + b"\x0a\0\x12\0" * 4000)


@pytest.mark.parametrize(
    ("build", "encoding", "says"),
    [
        (undeclared_zstd, "zstd", "limit of 67108864 bytes"),
        (declared_zstd, "zstd", "limit of 67108864 bytes"),
        (gzipped, "gzip", "limit of 67108864 bytes"),
        (sparse, "identity", "would take 53687091200 bytes as dense ones"),
        (of_many_dimensions, "identity", "fields, the most for its number of datums (1)"),
        (of_empty_chunks, "identity", "holds more than 262144 chunks and tensors"),
        (of_empty_datums, "identity", "holds more than 16384 datums"),
        (of_packed_datums, "zstd", "holds more than 16384 datums"),
        (of_more_packed_datums_than_a_body_holds, "zstd", "limit of 67108864 bytes"),
        (of_packed_kinds_of_a_chunk, "zstd", "fields, the most for its number of datums (1)"),
    ],
)
def test_a_bomb_fails_alone(victim: Victim, build: Callable[[Victim], bytes], encoding: str, says: str) -> None:
    before, server_before, pid = victim.highest_bytes, victim.server_highest_bytes, victim.worker_pid
    refused = victim.send(build, encoding).json()
    assert (refused["category"], says in refused["error"]) == ("user", True), refused
    answered = victim.send(lambda one: one.plain(next_token_datum([1, 2, 3])), "identity")
    assert answered.headers["content-type"].startswith("application/x-protobuf")
    assert victim.worker_pid == pid, "the worker has died of it"
    assert victim.highest_bytes - before < MOST_MORE_BYTES
    assert victim.server_highest_bytes - server_before < MOST_MORE_BYTES_OF_THE_SERVER
