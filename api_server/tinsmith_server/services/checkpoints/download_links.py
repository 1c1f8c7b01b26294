"""Download links of checkpoints. Download links are signed, expire, and need only a plain GET without a key."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Any
from urllib.parse import quote

import orjson

from tinsmith_server.errors import NotFound
from tinsmith_server.services.checkpoints.checkpoints import Checkpoints
from tinsmith_server.services.checkpoints.files import CheckpointFiles
from tinsmith_server.services.checkpoints.manifests import SavedFile, checked, saved_files
from tinsmith_server.store.records import Checkpoint, Clock, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import TinkerPath

SECRET_NAME = "external-urls"
DOWNLOAD_PATH = "/api/v1/downloads"
ARCHIVE_PATH = "/api/v1/archives"
ARCHIVE, FILES = "archive", "download"
"""The kinds of links. The signature includes the kind, so a link to an archive gives no access to single files."""

# Weights hardly compress: level 1 takes a sixth of the time of level 6, and saves as much.
LEVEL = 1
GZIP = zlib.MAX_WBITS | 16
END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True, slots=True)
class Links:
    """The URL of each file, by the file's path inside the checkpoint."""

    urls: dict[str, str]
    expires: datetime


@dataclass(frozen=True, slots=True)
class ArchiveLink:
    """A link to all files of a checkpoint."""

    url: str
    expires: datetime


@dataclass(frozen=True, slots=True)
class Download:
    size_bytes: int
    parts: Iterator[bytes]


class DownloadLinks:
    """An object that signs and checks links.

    A link contains the directory, the digest of its manifest, and the expiry. A link is signed with an HMAC that every
    replica can check. Files are compared with the manifest while they are sent.
    """

    def __init__(
        self, store: Store, checkpoints: Checkpoints, files: CheckpointFiles, ttl_seconds: float, clock: Clock = utc_now
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._files = files
        self._ttl = timedelta(seconds=ttl_seconds)
        self._clock = clock

    async def links(self, tenant: str, run_id: str, name: str, base_url: str) -> Links:
        """Return links to the files. Raises NotFound, and CheckpointDamaged for files that differ from the manifest."""
        path = TinkerPath(run_id, "external_weights", name)
        checkpoint = await self._checkpoints.readable(tenant, str(path))
        expires = self._expiry(checkpoint)
        token = sign(await self._secret(), _claim(FILES, checkpoint), expires)
        try:
            files = await self._saved_files(checkpoint.directory, checkpoint.manifest_digest)
        except FileNotFoundError:
            raise NotFound(f"the files of {path} are no longer kept") from None
        prefix = f"{base_url.rstrip('/')}{DOWNLOAD_PATH}/{token}"
        return Links({file: f"{prefix}/{quote(file)}" for file in sorted(files)}, expires)

    async def archive_link(self, tenant: str, path: TinkerPath, base_url: str) -> ArchiveLink:
        """Return a link to an archive of a checkpoint of any kind. Raises NotFound."""
        checkpoint = await self._checkpoints.readable(tenant, str(path))
        expires = self._expiry(checkpoint)
        token = sign(await self._secret(), _claim(ARCHIVE, checkpoint), expires)
        return ArchiveLink(f"{base_url.rstrip('/')}{ARCHIVE_PATH}/{token}", expires)

    async def archive(self, token: str) -> Iterator[bytes]:
        """Yield the archive.

        Raises NotFound for a forged link, an expired link or removed files, and CheckpointDamaged before the first
        part.
        """
        directory, digest = await self._linked(ARCHIVE, token)
        try:
            saved = await self._saved_files(directory, digest)
        except FileNotFoundError:
            raise NotFound("the checkpoint of this link is no longer kept") from None
        return archive_parts(self._files, directory, saved)

    def _expiry(self, checkpoint: Checkpoint) -> datetime:
        expires = self._clock() + self._ttl
        return expires if checkpoint.expires_at is None else min(expires, checkpoint.expires_at)

    async def download(self, token: str, path: str) -> Download:
        """Return a file. Raises the errors of `archive`, and NotFound for a file that is not in the checkpoint."""
        directory, digest = await self._linked(FILES, token)
        try:
            saved = (await self._saved_files(directory, digest))[path]
            parts = await asyncio.to_thread(self._files.read, directory, path)
        except (KeyError, FileNotFoundError):
            raise NotFound(f"the checkpoint has no file {path}, or is no longer kept") from None
        return Download(saved.size_bytes, await asyncio.to_thread(_begun, checked(parts, saved, path)))

    async def _linked(self, kind: str, token: str) -> tuple[str, str]:
        """Return the directory and the manifest's digest from a link of this kind. Raises NotFound."""
        match verify(await self._secret(), token, self._clock()):
            case [claimed, str(directory), str(digest)] if claimed == kind:
                return directory, digest
        raise NotFound(f"this {kind} link is invalid or has expired; request a new one")

    async def _saved_files(self, directory: str, digest: str) -> dict[str, SavedFile]:
        return await asyncio.to_thread(saved_files, self._files, directory, digest)

    async def _secret(self) -> bytes:
        return await self._store.secret(SECRET_NAME)


def _claim(kind: str, checkpoint: Checkpoint) -> list[str]:
    """Return the content that is signed.

    The content includes the digest of the manifest, so that the link gives access only to unchanged files.
    """
    return [kind, checkpoint.directory, checkpoint.manifest_digest]


def _begun(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Read the first part immediately.

    If a small file was altered, the client then gets an error response instead of an incomplete file.
    """
    return chain([next(parts, b"")], parts)


def archive_parts(files: CheckpointFiles, directory: str, saved: Mapping[str, SavedFile]) -> Iterator[bytes]:
    """Yield a gzipped tar of a checkpoint's files, in the order of their names.

    This function blocks: run it in a thread.
    """
    compressor = zlib.compressobj(LEVEL, wbits=GZIP)
    for part in _plain_parts(files, directory, saved):
        yield compressor.compress(part)
    yield compressor.flush()


def _plain_parts(files: CheckpointFiles, directory: str, saved: Mapping[str, SavedFile]) -> Iterator[bytes]:
    for name, file in sorted(saved.items()):
        entry = tarfile.TarInfo(name)
        entry.size = file.size_bytes
        yield entry.tobuf()
        yield from checked(files.read(directory, name), file, name)
        yield bytes(-file.size_bytes % tarfile.BLOCKSIZE)
    yield END


def sign(secret: bytes, what: object, expires: datetime) -> str:
    """Return the content `what`, its expiry and its signature as one URL segment."""
    claim = orjson.dumps([what, int(expires.timestamp())])
    return f"{_encode(claim)}.{_encode(_mac(secret, claim))}"


def verify(secret: bytes, token: str, now: datetime) -> Any:
    """Return the content of a valid token, or None if the token is not valid."""
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
