"""`tinsmith models` and `tinsmith tokenizer`: list the base models of a server, and download a tokenizer.

The SDK looks for a tokenizer by the name of the model: first in a directory with this name, then on the public hub. The
commands never ask the hub. The hub must not learn the names of private models, and may contain another repository with
the same name.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer
from rich.table import Table

from tinsmith.api import Api, ApiError, CallUnknown, RequestRefused, ServedModel
from tinsmith.console import AsJson, BaseUrl, fail, make_console
from tinsmith.credentials import api_key_from_environment, base_url_from_environment

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
"""The names of vocabulary files. Every tokenizer has at least one vocabulary file.

Without a vocabulary file, transformers makes an empty tokenizer and reports no error.
"""
LLAMA_3_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"

FILES = frozenset(
    {
        *VOCABULARY_FILES,
        "merges.txt",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
    }
)
"""The files that a server may send. An archive that contains a file with another name is refused."""
MOST_BYTES = 64 * 2**20
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


class TokenizerError(Exception):
    """An error about a tokenizer. `str(error)` names the tokenizer, the cause and the remedy."""


def tokenizer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Base model, by its name on the server.")],
    *,
    base_url: BaseUrl = None,
    replace: Annotated[bool, typer.Option("--replace", help="Overwrite files that differ.")] = False,
) -> None:
    """Download a base model's tokenizer from the server to ./MODEL, where the SDK looks for it first."""
    try:
        folder = folder_of(model)
        with Api(base_url or base_url_from_environment(), api_key_from_environment()) as api:
            files = unpacked(api.tokenizer_archive(model))
        written = put(files, folder, replace=replace)
    except (ApiError, TokenizerError, OSError) as error:
        fail("tokenizer", str(error))
    outcome = f"{written} files written" if written else "up to date"
    typer.echo(f"{folder}: {outcome}; programs started in {Path.cwd()} find the tokenizer of {model} there")


def load_tokenizer(model: str, base_url: str, api_key: str | None) -> Any | None:
    """Return the model's tokenizer from this machine or from the server, or None if neither of the two has a tokenizer.

    The function never asks the hub. Raises TokenizerError if the server's files are not a tokenizer, and ApiError.
    """
    from transformers import AutoTokenizer

    if (local := find_tokenizer(tokenizer_id(model))) is not None:
        try:
            return AutoTokenizer.from_pretrained(local, local_files_only=True)
        except (OSError, ValueError):
            return None  # the SDK can load some tokenizers that need their own code
    try:
        with Api(base_url, api_key) as api:
            archive = api.tokenizer_archive(model)
    except (CallUnknown, RequestRefused):
        return None
    folder = kept(archive)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the tokenizer of {model} from {base_url} cannot be loaded: {error}; put a working one into "
            f"./{tokenizer_id(model)}"
        ) from error


def folder_of(model: str) -> Path:
    """Return the directory in which the SDK looks for the tokenizer, relative to the working directory.

    Raises TokenizerError for a name that leads outside the working directory, because the server chooses the names.
    """
    path = PurePosixPath(tokenizer_id(model))
    if not path.parts or not all(_PART.fullmatch(part) for part in path.parts):
        raise TokenizerError(
            f"the model name {model!r} is not a path below this directory, so no files are written; use letters, "
            "digits, '.', '_' and '-' between slashes"
        )
    return Path(path)


def unpacked(archive: bytes) -> dict[str, bytes]:
    """Return the files of an archive by name.

    Raises TokenizerError if the archive contains anything but tokenizer files.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as packed:
            listed = packed.infolist()
            if strange := [member.filename for member in listed if member.filename not in FILES]:
                raise TokenizerError(f"the server's archive has an unexpected file: {strange[0][:100]!r}")
            if (
                len({member.filename for member in listed}) < len(listed)
                or sum(member.file_size for member in listed) > MOST_BYTES
            ):
                raise TokenizerError(f"the server's archive has duplicate files, or more than {MOST_BYTES} bytes")
            # The checksum fails for a member that is longer than declared.
            files = {member.filename: packed.read(member) for member in listed}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise TokenizerError(f"the server's answer is not a readable zip archive: {error}") from error
    if files.keys().isdisjoint(VOCABULARY_FILES):
        raise TokenizerError(f"the server's archive has no vocabulary: none of {', '.join(VOCABULARY_FILES)}")
    return files


def put(files: Mapping[str, bytes], folder: Path, *, replace: bool) -> int:
    """Write the missing files, and return how many files were written.

    Raises TokenizerError if an existing file has other content.
    """
    there = {name: (folder / name).read_bytes() for name in files if (folder / name).exists()}
    differing = sorted(name for name, content in there.items() if content != files[name])
    if differing and not replace:
        raise TokenizerError(
            f"{', '.join(differing)} in {folder} differs from the server's; use --replace to overwrite it"
        )
    folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in files if there.get(name) != files[name]]
    for name in missing:
        _write(folder / name, files[name])
    return len(missing)


def kept(archive: bytes) -> Path:
    """Return the directory in the user's cache that holds the archive's files.

    The name of the directory is the digest of the files.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tinsmith" / "tokenizers"
    folder = root / hashlib.sha256(archive).hexdigest()
    if not folder.is_dir():
        files = unpacked(archive)
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as made:
            whole = Path(made) / "whole"
            put(files, whole, replace=False)
            try:
                whole.rename(folder)
            except OSError:
                # Another process has just written the same files.
                if not folder.is_dir():
                    raise
    return folder


def _write(path: Path, content: bytes) -> None:
    """Replace the file in one step, so that a reader sees the old file or the new file."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def models(
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """List the base models of a server by the names that programs use for them."""
    try:
        with Api(base_url or base_url_from_environment(), api_key_from_environment()) as api:
            served = api.served_models()
    except ApiError as error:
        fail("models", f"{error}; run `tinsmith doctor` to find out why")
    if as_json:
        print(json.dumps([asdict(model) for model in served]))
    else:
        make_console().print(_table(served))


def _table(served: list[ServedModel]) -> Table:
    table = Table("model", "longest sequence", box=None, pad_edge=False)
    for model in served:
        table.add_row(model.name, f"{model.max_context_length} tokens" if model.max_context_length else "unknown")
    return table


def tokenizer_id(model_name: str) -> str:
    """Return the directory or hub repository in which SDK 0.38 looks for the tokenizer of this base model."""
    name = model_name.partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return LLAMA_3_TOKENIZER
    if name.count("/") == 2:
        return name.rpartition("/")[0]
    return name


def find_tokenizer(identifier: str) -> Path | None:
    """Return the folder from which transformers can load the tokenizer without a download, or None."""
    directory = Path(identifier)
    if directory.is_dir():
        return directory if any((directory / name).is_file() for name in VOCABULARY_FILES) else None
    return _find_in_hub_cache(identifier)


def _find_in_hub_cache(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in VOCABULARY_FILES:
        try:
            found = try_to_load_from_cache(repository, name)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None
