"""Files that only the holders of an age identity can read (https://age-encryption.org/v1)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import pyrage
from typing_extensions import Buffer, override

from tinsmith_trainer.disk.durable_files import Pieces
from tinsmith_trainer.errors import UserError

SUFFIX = ".age"


def encrypt(files: Mapping[str, Pieces], recipients: Sequence[str]) -> dict[str, Pieces]:
    """Encrypt each file for all recipients, such as `age1…`, and append `.age` to the file names.

    Encrypting a file twice gives different bytes. Raises UserError for an invalid recipient.
    """
    keys = [_recipient(recipient) for recipient in recipients]
    return {f"{name}{SUFFIX}": _encrypt(content, keys) for name, content in files.items()}


def _recipient(text: str) -> pyrage.x25519.Recipient:
    try:
        return pyrage.x25519.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise UserError(
            f"{text[:80]!r} is not an age recipient ({error}): `age-keygen -y` prints one, age1…."
        ) from error


def _encrypt(content: Pieces, keys: Sequence[pyrage.x25519.Recipient]) -> Pieces:
    ciphertext = io.BytesIO()
    pyrage.encrypt_io(io.BufferedReader(_Reader(content), buffer_size=io.DEFAULT_BUFFER_SIZE), ciphertext, keys)
    return [ciphertext.getbuffer()]


class _Reader(io.RawIOBase):
    """A file object that reads several pieces of memory in order, without a copy of the whole content."""

    def __init__(self, content: Pieces) -> None:
        self._pieces = [memoryview(piece) for piece in content]

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer, /) -> int:
        while self._pieces and not self._pieces[0]:
            del self._pieces[0]
        if not self._pieces:
            return 0
        target = memoryview(buffer)
        size = min(len(target), len(self._pieces[0]))
        target[:size] = self._pieces[0][:size]
        self._pieces[0] = self._pieces[0][size:]
        return size
