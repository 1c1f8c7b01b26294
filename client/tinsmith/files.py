"""Files that the commands and the library read and write."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer


def make_output_folder(folder: Path, option: str) -> None:
    """Create the folder if the folder does not exist.

    Raise typer.BadParameter for the option if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise typer.BadParameter(f"{folder} cannot be written: {error.strerror}", param_hint=option) from error


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace the content of the file in one step. After an OSError, no temporary file is left."""
    written = file.with_name(f".{file.name}.new")
    try:
        written.write_bytes(content if isinstance(content, bytes) else content.encode())
        os.replace(written, file)
    except BaseException:
        written.unlink(missing_ok=True)
        raise


class NoJson(ValueError):
    """An error for a line that contains no usable JSON value. `str(error)` is the reason."""


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each non-empty line with its number. Raises OSError and UnicodeDecodeError.

    Only line feeds end a line, as in an editor or in `wc`. `str.splitlines` would also split at U+2028, U+0085 and
    other characters that JSON allows in strings. A byte order mark at the start is skipped.
    """
    text = file.read_bytes().decode("utf-8-sig")
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def parse_line(line: str) -> Any:
    """Return the JSON value in the line. Raises NoJson. A string that UTF-8 cannot encode also raises NoJson."""
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise NoJson(f"no JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise NoJson("no JSON: it nests too deeply") from error
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise NoJson(f"a string holds \\u{half:04x}, half of a character beyond U+FFFF; write both halves") from error
    return value


def without_empty(record: dict[str, Any], *kept: str) -> dict[str, Any]:
    """Return the record without keys that have empty values.

    For example, exporters write `"tools": []` in every record.
    """
    return {name: value for name, value in record.items() if name in kept or value not in (None, [], {}, "")}
