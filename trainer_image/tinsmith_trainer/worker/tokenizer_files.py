"""The files of a base model's tokenizer, for programs that cannot read the model's files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith_trainer.errors import ServerError, UserError

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
FILES = (
    *VOCABULARY_FILES,
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    # If tokenizer_config.json does not name the tokenizer's class, this file does.
    "config.json",
)
"""The names of the files that are served. These files contain no weights, and no code that a client would run."""
MOST_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The tokenizer's files.

    Two tokenizers have the same `digest` if the names and contents of the files are the same.
    """

    digest: str
    files: Mapping[str, bytes]


def read_tokenizer(directory: Path) -> Tokenizer:
    """Read the files that `FILES` allows.

    Raises UserError if the model has no tokenizer, if a link points outside the model's folders, or if the files exceed
    `MOST_BYTES`. Raises ServerError if a file cannot be read.
    """
    files: dict[str, bytes] = {}
    room = MOST_BYTES
    for name in FILES:
        if (content := _read(directory, name, room)) is not None:
            files[name] = content
            room -= len(content)
    if not any(name in files for name in VOCABULARY_FILES):
        raise UserError(
            f"the base model's directory has no tokenizer ({', '.join(VOCABULARY_FILES)}); give the program a "
            "tokenizer from elsewhere"
        )
    return Tokenizer(_digest(files), files)


def _read(directory: Path, name: str, room: int) -> bytes | None:
    try:
        path = (directory / name).resolve(strict=True)
    except (FileNotFoundError, RuntimeError):  # RuntimeError is a loop of links
        return None
    except OSError as error:
        raise ServerError(f"{name} of the base model cannot be read: {error.strerror}") from error
    if not path.is_file():
        return None
    if not any(path.is_relative_to(place) for place in _folders_of(directory)):
        raise UserError(
            f"{name} of the base model is a link to a file outside of the model's directory, and is not given away; an "
            "administrator can replace the link by the file"
        )
    try:
        with path.open("rb") as file:
            content = file.read(room + 1)
    except OSError as error:
        raise ServerError(f"{name} of the base model cannot be read: {error.strerror}") from error
    if len(content) > room:
        raise UserError(f"the base model's tokenizer files have more than {MOST_BYTES} bytes in all, with {name}")
    return content


def _folders_of(directory: Path) -> list[Path]:
    """Return the folders that contain the model's files.

    In the hub's cache, a snapshot consists of links to the folder of blobs.
    """
    real = directory.resolve()
    in_hub_cache = real.parent.name == "snapshots" and real.parent.parent.name.startswith("models--")
    return [real, real.parent.parent / "blobs"] if in_hub_cache else [real]


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()
