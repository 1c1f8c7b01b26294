"""`tinsmith import`: upload an adapter that was trained elsewhere, as a checkpoint."""

from __future__ import annotations

import json
import tarfile
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from tinsmith.api import Api, ApiError
from tinsmith.console import BaseUrl, fail
from tinsmith.credentials import api_key_from_environment, base_url_from_environment

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
COPY_BYTES = 2**20


class NoAdapter(Exception):
    """An error for files that are not an adapter. `str(error)` says what is missing, and where."""


def import_adapter(
    adapter: Annotated[Path, typer.Argument(help="Folder in PEFT's format, or a .tar archive from Tinker.")],
    base_model: Annotated[str, typer.Option(help="Base model, by its name on the server.")],
    base_url: BaseUrl = None,
) -> None:
    """Upload a LoRA adapter made elsewhere to a server, as a checkpoint to train or sample from."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="tinsmith-import-") as unpacked,
            Api(base_url or base_url_from_environment(), api_key_from_environment()) as api,
        ):
            files = _files(adapter, Path(unpacked))
            upload = api.start_upload(base_model, _rank(files[CONFIG_FILE]))
            for name, url in upload.urls.items():
                api.send_file(url, files[name])
            print(api.finish_upload(upload.upload_id))
    except (ApiError, NoAdapter) as error:
        fail("import", str(error))


def _files(adapter: Path, unpacked: Path) -> dict[str, Path]:
    if adapter.is_file():
        return _from_archive(adapter, unpacked)
    files = {name: adapter / name for name in (CONFIG_FILE, WEIGHTS_FILE)}
    missing = [name for name, path in files.items() if not path.is_file()]
    if missing:
        hint = "; only weights in safetensors format are supported" if missing == [WEIGHTS_FILE] else ""
        raise NoAdapter(f"{adapter} has no {missing[0]}{hint}")
    return files


def _from_archive(archive: Path, unpacked: Path) -> dict[str, Path]:
    """Copy only the two known files, and ignore the rest of the archive."""
    found: dict[str, Path] = {}
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                name = member.name.rpartition("/")[2]
                content = opened.extractfile(member) if name in (CONFIG_FILE, WEIGHTS_FILE) else None
                if content is None:
                    continue
                if name in found:
                    raise NoAdapter(f"{archive} has more than one {name}")
                found[name] = unpacked / name
                with found[name].open("wb") as copy:
                    while part := content.read(COPY_BYTES):
                        copy.write(part)
    except (tarfile.TarError, OSError) as error:
        raise NoAdapter(f"{archive} is not a readable tar archive: {error}") from error
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if name not in found:
            raise NoAdapter(f"{archive} has no {name}")
    return found


def _rank(config: Path) -> int:
    try:
        return int(json.loads(config.read_bytes())["r"])
    except (ValueError, TypeError, KeyError) as error:
        raise NoAdapter(f"{config} has no rank (`r`): it is not a PEFT LoRA config") from error
