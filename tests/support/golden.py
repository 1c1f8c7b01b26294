"""Reviewed copies of generated objects: one complete file, and the differences of the other cases from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import yaml

WRITES = os.environ.get("TINSMITH_GOLDEN") == "write"


class _Dumper(yaml.SafeDumper):
    """A dumper that writes scripts as blocks and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def assert_golden(file: Path, objects: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]] | None = None) -> None:
    """Compare the objects, or their difference from the base, with a file. TINSMITH_GOLDEN=write writes the file."""
    text = _dumped(objects) if base is None else "".join(_differences(_dumped(base), _dumped(objects)))
    if WRITES:
        file.write_text(text)
    assert file.exists(), f"{file.name} does not exist: `make golden` writes it"
    assert text == file.read_text(), f"{file.name} differs; if the change is intended, `make golden` writes it"


def _dumped(objects: Sequence[dict[str, Any]]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)


def _differences(old: str, new: str) -> Iterator[str]:
    """Yield the changed lines, each run under the object, the path and the last unchanged line."""
    before, after = old.splitlines(keepends=True), new.splitlines(keepends=True)
    for tag, start, end, new_start, new_end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag != "equal":
            yield f"@@ {_place(before, start)}\n"
            yield from (f"-{line}" for line in before[start:end])
            yield from (f"+{line}" for line in after[new_start:new_end])


def _place(lines: Sequence[str], position: int) -> str:
    """Return the kind and name of the object around a line, the keys above the line, and the line before it."""
    first = max((at + 1 for at in range(position) if lines[at] == "---\n"), default=0)
    indent = _indent(lines[position]) if position < len(lines) else 0
    keys: list[str] = []
    for line in reversed(lines[first:position]):
        if _indent(line) < indent and line.rstrip().endswith(":"):
            keys.insert(0, line.strip(" -\n:"))
            indent = _indent(line)
    following = lines[first : next((at for at in range(first, len(lines)) if lines[at] == "---\n"), len(lines))]
    kind = next((line[6:-1] for line in following if line.startswith("kind: ")), "")
    name = next((line[8:-1] for line in following if line.startswith("  name: ")), "")
    previous = lines[position - 1].strip() if position else ""
    return " ".join(filter(None, [kind, name, ".".join(keys), f"after `{previous}`"]))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" -"))
