"""The files of a checkpoint. Files are checked against the manifest when they are copied or downloaded.

The store holds the digest of the manifest. The manifest holds the size and the digest of each file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

from tinsmith_server.errors import CheckpointDamaged
from tinsmith_server.services.checkpoints.files import MANIFEST, CheckpointFiles

MOST_MANIFEST_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class SavedFile:
    """The size and the digest that the worker recorded for a file."""

    size_bytes: int
    sha256: str


def saved_files(files: CheckpointFiles, directory: str, manifest_digest: str) -> dict[str, SavedFile]:
    """Return the files of a checkpoint by name, after checking that each file has its full size.

    This function blocks: run it in a thread. Raises FileNotFoundError for a missing manifest, CheckpointDamaged, and
    the errors of `files`.
    """
    content = b"".join(_at_most(files.read(directory, MANIFEST), MOST_MANIFEST_BYTES))
    if hashlib.sha256(content).hexdigest() != manifest_digest:
        raise CheckpointDamaged(
            f"the checkpoint {directory} was altered: its manifest differs from the saved one; use another checkpoint"
        )
    entries = orjson.loads(content)["files"]
    saved = {name: SavedFile(entry["size_bytes"], entry["sha256"]) for name, entry in entries.items()}
    _check_sizes(directory, saved, files.list(directory))
    return saved


def checked(parts: Iterator[bytes], saved: SavedFile, name: str) -> Iterator[bytes]:
    """Yield the parts of a file. Yield the last part only if the digest of the file is correct.

    Raises CheckpointDamaged.

    The digest is computed from the sent bytes. A check before sending would double the traffic of a bucket and the time
    that the client waits. A check before sending would also not cover the bytes that are sent, because they come from a
    second read. An altered file never arrives completely: the response ends before its announced length, and clients
    report this as an error. Only one part is held back, so the use of memory is bounded.
    """
    digest, size_bytes, held = hashlib.sha256(), 0, b""
    for part in parts:
        digest.update(part)
        size_bytes += len(part)
        if held:
            yield held
        held = part
    if (size_bytes, digest.hexdigest()) != (saved.size_bytes, saved.sha256):
        raise CheckpointDamaged(
            f"the file {name} was altered after it was saved: it differs from its checkpoint's manifest; use another "
            "checkpoint"
        )
    yield held


def _check_sizes(directory: str, saved: Mapping[str, SavedFile], found: Mapping[str, int]) -> None:
    for name, file in saved.items():
        if found.get(name) != file.size_bytes:
            state = f"has {found[name]} bytes" if name in found else "is missing"
            raise CheckpointDamaged(
                f"the checkpoint {directory} is damaged or being deleted: {name} {state}, and its manifest says "
                f"{file.size_bytes} bytes; use another checkpoint"
            )


def _at_most(parts: Iterator[bytes], most_bytes: int) -> Iterator[bytes]:
    """Yield the parts up to a limit. A replaced manifest must not fill the memory."""
    size_bytes = 0
    for part in parts:
        yield part
        size_bytes += len(part)
        if size_bytes > most_bytes:
            return
