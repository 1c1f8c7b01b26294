"""Read JSON Lines: one JSON value a line, in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class NoJson(ValueError):
    """A line is no JSON value that can be used. `str(error)` says why."""


def numbered_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold something, with their numbers. Raises OSError and UnicodeDecodeError.

    Only line feeds end a line, as in editors and in `wc`: `str.splitlines` also cuts at U+2028, U+0085 and others,
    which JSON allows within strings. A byte order mark at the beginning is left out.
    """
    text = file.read_bytes().decode("utf-8-sig")
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def parse_line(line: str) -> Any:
    """Return the line's JSON value. Raises NoJson, also for strings that no UTF-8 and so no tokenizer can encode."""
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
    """Return the record without keys that say nothing: exporters write `"tools": []` or `"name": null` for all."""
    return {name: value for name, value in record.items() if name in kept or value not in (None, [], {}, "")}
