"""What a server gives away of a checkpoint: files by links of their own, or one archive of all. Streamed to a disk.

A link is a permission by itself, and is asked without a key: it may lead to a storage that is not to learn it.
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
"""In the user_metadata of a training run that a command makes for a moment: the server's lists leave it out."""
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
SILENCE_SECONDS = 60.0
"""Without a byte, not in all."""
NO_SUCH_CALL = (tinker.NotFoundError, tinker.UnprocessableEntityError, tinker.BadRequestError)
GZIP_MAGIC = b"\x1f\x8b"
DRAIN_BYTES = 2**20


def fetch_export(rest: tinker.RestClient, export_path: str, targets: Mapping[str, Path]) -> None:
    """Of what `save_weights_external` made, these files by their names.

    Raises NotOffered where one is not among them, and DownloadDamaged.
    """
    urls = rest.get_external_weights_urls(export_path).result().urls
    for name, target in targets.items():
        if name not in urls:
            raise NotOffered(f"the server's export {export_path} has no {name}")
        with target.open("wb") as file:
            _download(urls[name], file)


def fetch_from_archive(rest: tinker.RestClient, path: str, targets: Mapping[str, Path]) -> None:
    """Of a checkpoint of any kind, these files by their names; the whole archive is on this machine's disk meanwhile.

    Raises NotOffered where the server has no archives, or this one not all of the files; and DownloadDamaged.
    """
    left = dict(targets)
    try:
        with _archive(rest, path) as content:
            with _opened(content, path) as archive:
                for member in archive:
                    # Of a link, a stream cannot go to what it stands for.
                    if member.name in left and member.isreg():
                        _write(cast(IO[bytes], archive.extractfile(member)), left.pop(member.name))
            _read_to_the_end(content)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _damaged(error) from error
    if left:
        raise NotOffered(f"the server's archive of {path} has no {next(iter(left))}")


@contextmanager
def _archive(rest: tinker.RestClient, path: str) -> Iterator[BinaryIO]:
    """Without gzip's layer, where it has one."""
    with tempfile.TemporaryFile() as file:
        _ask_for_archive(rest, path, file)
        file.seek(0)
        compressed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        file.seek(0)
        yield cast(BinaryIO, gzip.GzipFile(fileobj=file) if compressed else file)


def _opened(content: BinaryIO, path: str) -> tarfile.TarFile:
    """With its first header read. Raises NotOffered, and gzip's errors where that is why there is none."""
    try:
        return tarfile.open(fileobj=content, mode="r|")
    except tarfile.ReadError as error:
        content.seek(0)
        _read_to_the_end(content)
        raise NotOffered(f"what the server gives for {path} is no archive") from error


def _read_to_the_end(content: BinaryIO) -> None:
    """gzip compares its digest of the content behind the last byte, to which no archive reads."""
    while content.read(DRAIN_BYTES):
        pass


def _ask_for_archive(rest: tinker.RestClient, path: str, target: IO[bytes]) -> None:
    """The SDK has no function for it any more; its layer of HTTP makes the call, which mostly leads to a link."""
    parsed = tinker.ParsedCheckpointTinkerPath.from_tinker_path(path)
    address = f"/api/v1/training_runs/{parsed.training_run_id}/checkpoints/{parsed.checkpoint_id}/archive"
    holder = rest.holder

    async def ask() -> None:
        options: Any = {"timeout": SILENCE_SECONDS}
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            # The SDK's own transport follows by itself, whatever it is told, and takes its `X-API-Key` along.
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
        raise NotOffered(f"this server gives no archive of {path}") from error
    except tinker.APIStatusError as error:
        # To the SDK a redirect is an error, as whatever is no success.
        if (onward := error.response.next_request) is None:
            raise
        _download(str(onward.url), target)
    except httpx.TransportError as error:
        raise _damaged(error) from error


def _trusted() -> ssl.SSLContext:
    """httpx's authorities and this machine's, as the SDK has it."""
    context = httpx.create_ssl_context()
    context.load_default_certs()
    return context


def _download(url: str, target: IO[bytes]) -> None:
    """Without a key, wherever it leads."""
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
    return DownloadDamaged(f"a file did not come whole from the server: {error or type(error).__name__}; try again")
