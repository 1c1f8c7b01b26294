"""Download links of checkpoints: signed, expiring, readable by a plain GET without a key."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import orjson

from tinsmith_server.errors import NotFound
from tinsmith_server.services.checkpoints.checkpoints import Checkpoints
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.store.base import Store
from tinsmith_server.store.records import Checkpoint, Clock, utc_now
from tinsmith_server.wire.ids import TinkerPath

SECRET_NAME = "external-urls"
DOWNLOAD_PATH = "/api/v1/downloads"
ARCHIVE_PATH = "/api/v1/archives"
ARCHIVE = "archive"
"""In what is signed: a link to an archive is none to single files."""

# Weights hardly compress: level 1 costs a sixth of the time of level 6, and saves as much.
LEVEL = 1
GZIP = zlib.MAX_WBITS | 16
END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Links:
    """URLs by the files' paths inside the checkpoint."""

    urls: dict[str, str]
    expires: datetime


@dataclass(frozen=True, slots=True)
class ArchiveLink:
    """To all files of a checkpoint at once."""

    url: str
    expires: datetime


@dataclass(frozen=True, slots=True)
class Download:
    size_bytes: int
    parts: Iterator[bytes]


class DownloadLinks:
    """A link holds the directory and its end of life under an HMAC that every replica can check."""

    def __init__(
        self, store: Store, checkpoints: Checkpoints, files: CheckpointFiles, ttl_seconds: float, clock: Clock = utc_now
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._files = files
        self._ttl = timedelta(seconds=ttl_seconds)
        self._clock = clock

    async def links(self, tenant: str, run_id: str, name: str, base_url: str) -> Links:
        path = TinkerPath(run_id, "external_weights", name)
        checkpoint = await self._checkpoints.readable(tenant, str(path))
        expires = self._expiry(checkpoint)
        token = sign(await self._secret(), checkpoint.directory, expires)
        files = await asyncio.to_thread(self._files.list, checkpoint.directory)
        prefix = f"{base_url.rstrip('/')}{DOWNLOAD_PATH}/{token}"
        return Links({file: f"{prefix}/{quote(file)}" for file in sorted(files)}, expires)

    async def archive_link(self, tenant: str, path: TinkerPath, base_url: str) -> ArchiveLink:
        """Of a checkpoint of any kind. Raises NotFound."""
        checkpoint = await self._checkpoints.readable(tenant, str(path))
        expires = self._expiry(checkpoint)
        token = sign(await self._secret(), [ARCHIVE, checkpoint.directory], expires)
        return ArchiveLink(f"{base_url.rstrip('/')}{ARCHIVE_PATH}/{token}", expires)

    async def archive(self, token: str) -> Iterator[bytes]:
        """Raises NotFound for a forged or expired link, and once the checkpoint's files are gone."""
        match verify(await self._secret(), token, self._clock()):
            case [kind, directory] if kind == ARCHIVE and await asyncio.to_thread(self._files.list, directory):
                return archive_parts(self._files, directory)
        raise NotFound("this link to an archive is not valid, or no longer; ask for a new one")

    def _expiry(self, checkpoint: Checkpoint) -> datetime:
        expires = self._clock() + self._ttl
        return expires if checkpoint.expires_at is None else min(expires, checkpoint.expires_at)

    async def download(self, token: str, path: str) -> Download:
        """Raises NotFound for a forged or expired link, and once the checkpoint's files are gone."""
        directory = verify(await self._secret(), token, self._clock())
        if not isinstance(directory, str):
            raise NotFound("this download link is not valid, or no longer; ask for a new one")
        try:
            size = (await asyncio.to_thread(self._files.list, directory))[path]
            return Download(size, await asyncio.to_thread(self._files.read, directory, path))
        except (KeyError, FileNotFoundError):
            raise NotFound(f"the checkpoint has no file {path}, or is no longer kept") from None

    async def _secret(self) -> bytes:
        return await self._store.secret(SECRET_NAME)


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


def sign(secret: bytes, what: object, expires: datetime) -> str:
    """One URL segment that says what its bearer may use until when, such as which directory."""
    claim = orjson.dumps([what, int(expires.timestamp())])
    return f"{_encode(claim)}.{_encode(_mac(secret, claim))}"


def verify(secret: bytes, token: str, now: datetime) -> Any:
    """What a valid token was made for; None for anything else."""
    try:
        claim, mac = (_decode(part) for part in token.split("."))
        if not hmac.compare_digest(mac, _mac(secret, claim)):
            return None
        what, expires = orjson.loads(claim)
    except (ValueError, binascii.Error):
        return None
    return what if now < datetime.fromtimestamp(expires, UTC) else None


def _mac(secret: bytes, claim: bytes) -> bytes:
    return hmac.new(secret, claim, hashlib.sha256).digest()


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
