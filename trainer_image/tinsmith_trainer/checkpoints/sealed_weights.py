"""An adapter's weights in memory that another process of the same machine can map, and nobody can change.

It is a file without a name (memfd), so it is gone with the last process that has it, however that ends. It is sealed
before anybody gets it: a file that could be shortened would take whoever has it mapped along.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
from dataclasses import asdict

from tinsmith_trainer.disk.durable_files import BLOCK_BYTES, size_of
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.tensor_files import TENSOR_ALIGNMENT_BYTES, tensor_file, tensors_of

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
"""For good, since a seal of a memfd cannot be broken."""


class WeightsUnusable(Exception):
    """What came is no sealed weights of this base model, and says so."""


class SealedWeights:
    """The owner of the file; `description` is what `mapped` needs beside it, of some hundred bytes."""

    def __init__(self, state: AdapterState, base_revision: str) -> None:
        """Copies the state's weights. Raises OSError where the machine has no room, or no such files."""
        tensors = state.weights_only().tensors
        header, *content = tensor_file(tensors, {})
        begin = -len(header) % TENSOR_ALIGNMENT_BYTES
        self.size_bytes = begin + len(header) + size_of(content)
        self.description = json.dumps(
            {
                "base_model_revision": base_revision,
                "begins_at": begin,
                "lora": asdict(state.lora),
                "optimizer_step": state.optimizer_step,
                "size_bytes": self.size_bytes,
            }
        ).encode()
        self._file = os.fdopen(os.memfd_create("tinsmith-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", 0)
        try:
            for piece in (bytes(begin), header, *content):
                self._write(memoryview(piece))
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            self._file.close()
            raise

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Whoever has mapped it keeps it."""
        self._file.close()

    def _write(self, piece: memoryview) -> None:
        while piece:
            piece = piece[self._file.write(piece[:BLOCK_BYTES]) :]


def mapped(descriptor: int, description: bytes, base_revision: str) -> AdapterState:
    """Of a file that a `SealedWeights` has made: its tensors are the file's own pages, which stay while they are used.

    Writing to them changes no other process's. Raises WeightsUnusable.
    """
    try:
        told = json.loads(description)
        size_bytes, begin = int(told["size_bytes"]), int(told["begins_at"])
        lora = LoraSpec(**told["lora"])
        if told["base_model_revision"] != base_revision:
            raise WeightsUnusable("they are of another base model")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise WeightsUnusable("their file can still be changed")
        if os.fstat(descriptor).st_size != size_bytes:
            raise WeightsUnusable("their file has another size than was said")
        pages = mmap.mmap(descriptor, size_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        return AdapterState(lora, int(told["optimizer_step"]), tensors_of(memoryview(pages)[begin:]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise WeightsUnusable(str(error) or type(error).__name__) from error
