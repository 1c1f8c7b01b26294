"""Downloads of the files of a checkpoint from a server. Links and archives are streamed to disk.

A link is fetched without a key, because the link may lead to a storage service that must not learn the key.
"""

from __future__ import annotations

import gzip
import shutil
import ssl
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import httpx
import tinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from tinsmith.training.errors import DownloadDamaged, NotOffered

PURPOSE = "tinsmith-purpose"
"""The key in user_metadata that marks the temporary training run of a command.

The server's lists do not contain temporary runs.
"""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
SILENCE_SECONDS = 60.0
"""The longest time to wait for the next byte. The duration of the whole download is not limited."""
NO_SUCH_CALL = (tinker.NotFoundError, tinker.UnprocessableEntityError, tinker.BadRequestError)
GZIP_MAGIC = b"\x1f\x8b"
DRAIN_BYTES = 2**20


def fetch_export(rest: tinker.RestClient, export_path: str, targets: Mapping[str, Path]) -> None:
    """Download files from an export of `save_weights_external`. `targets` maps names to paths.

    Raises DownloadDamaged, and NotOffered if the export does not contain one of the files.
    """
    urls = rest.get_external_weights_urls(export_path).result().urls
    for name, target in targets.items():
        if name not in urls:
            raise NotOffered(f"the server's export {export_path} has no file {name}")
        with target.open("wb") as file:
            _download(urls[name], file)


def fetch_from_archive(rest: tinker.RestClient, path: str, targets: Mapping[str, Path]) -> None:
    """Download files of a checkpoint of any kind. `targets` maps names to paths.

    The disk of this machine must have space for the whole archive. Raises NotOffered if the server has no archives or
    if the archive lacks a file, and DownloadDamaged.
    """
    left = dict(targets)
    try:
        with _archive(rest, path) as content:
            with _opened(content, path) as archive:
                for member in archive:
                    # In a stream, the target of a link cannot be read.
                    if member.name in left and member.isreg():
                        _write(cast(IO[bytes], archive.extractfile(member)), left.pop(member.name))
            _read_to_the_end(content)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(error) from error
    if left:
        raise NotOffered(f"the server's archive of {path} has no {next(iter(left))}")


@contextmanager
def _archive(rest: tinker.RestClient, path: str) -> Iterator[BinaryIO]:
    """Download the archive, and yield the uncompressed content."""
    with tempfile.TemporaryFile() as file:
        _ask_for_archive(rest, path, file)
        file.seek(0)
        compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        file.seek(0)
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file) if compressed else file)


def _opened(content: BinaryIO, path: str) -> tarfile.TarFile:
    """Open the archive, and read the first header.

    Raises NotOffered if the file is not an archive, and the errors of gzip.
    """
    try:
        return tarfile.open(fileobj=content, mode="r|")
    except tarfile.ReadError as error:
        content.seek(0)
        _read_to_the_end(content)
        raise NotOffered(f"the server's answer for {path} is not an archive") from error


def _read_to_the_end(content: BinaryIO) -> None:
    """Read to the end of the stream, because gzip compares the digest only at the end.

    A reader of archives would stop before the end of the stream.
    """
    while content.read(DRAIN_BYTES):
        pass


def _ask_for_archive(rest: tinker.RestClient, path: str, target: IO[bytes]) -> None:
    """Request the archive through the HTTP layer of the SDK, because the SDK has no function for archives any more.

    Most servers answer with a redirect to a link.
    """
    parsed = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path)
    address = f"/api/v1/training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}/archive"
    holder = rest.holder

    async def ask() -> None:
        options: Any = {"timeout": SILENCE_SECONDS}
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            # The SDK's own transport always follows redirects, and sends its `X-API-Key` with them.
            async with httpx.AsyncClient(verify=_trusted(), follow_redirects=False) as stays:
                asking = client.with_options(http_client=stays)
                answer: httpx.Response = await asking.get(address, cast_to=httpx.Response, options=options, stream=True)
                async with aclosing(answer):
                    async for part in answer.aiter_bytes():
                        target.write(part)

    request: Future[None] = holder.run_coroutine_threadsafe(ask()).future()
    try:
        request.result()
    except NO_SUCH_CALL as error:
        raise NotOffered(f"this server offers no archive of {path}") from error
    except tinker.APIStatusError as error:
        # The SDK raises an error for a redirect.
        if (onward := error.response.next_request) is None:
            raise
        _download(str(onward.url), target)
    except httpx.TransportError as error:
        raise _damaged(error) from error


def _trusted() -> ssl.SSLContext:
    """Return the certificate authorities of httpx and of this machine. The SDK trusts the same authorities."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context


def _download(url: str, target: IO[bytes]) -> None:
    """Download a file from a link, without a key."""
    try:
        with httpx.stream("GET", url, timeout=SILENCE_SECONDS, follow_redirects=True, verify=_trusted()) as answer:
            for part in answer.raise_for_status().iter_bytes():
                target.write(part)
    except httpx.HTTPError as error:
        raise _damaged(error) from error


def _write(file: IO[bytes], target: Path) -> None:
    with target.open("wb") as copy:
        shutil.copyfileobj(file, copy)


def _damaged(error: Exception) -> DownloadDamaged:
    return DownloadDamaged(f"a file was not downloaded completely: {error or type(error).__name__}; try again")
