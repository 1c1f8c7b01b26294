"""A checkpoint's files as one compressed archive, as SDKs up to 0.34 fetch them: written while it is sent."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator

from tinsmith_server.services.checkpoints.files import CheckpointFiles

# Weights hardly compress: level 1 costs a sixth of the time of level 6, and saves as much.
LEVEL = 1
GZIP = zlib.MAX_WBITS | 16
END = bytes(2 * tarfile.BLOCKSIZE)


def archive_parts(files: CheckpointFiles, directory: str) -> Iterator[bytes]:
    """A gzipped tar of the files below `directory`, in the order of their names. Blocking: run it in a thread."""
    compressor = zlib.compressobj(LEVEL, wbits=GZIP)
    for part in _plain_parts(files, directory):
        yield compressor.compress(part)
    yield compressor.flush()


def _plain_parts(files: CheckpointFiles, directory: str) -> Iterator[bytes]:
    for name, size in sorted(files.list(directory).items()):
        entry = tarfile.TarInfo(name)
        entry.size = size
        yield entry.tobuf()
        yield from files.read(directory, name)
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield END
