"""The archive of a report: everything goes through the redactor, and an index says what is in it and what is not."""

from __future__ import annotations

import io
import json
import os
import tarfile
from datetime import datetime
from pathlib import Path
from typing import Any

from tinsmith.cluster.errors import PluginError
from tinsmith.cluster.redaction import REMOVED, Redactor

INDEX = "INDEX.md"
OWNER_ALONE = 0o600

HEAD = f"""# A report of Tinsmith

Made {{made:%Y-%m-%dT%H:%M:%SZ}} by `kubectl tinsmith report`.

Taken out, and marked `{REMOVED}` where it stood: the values of variables, fields and options that are named like a
password, a key or a token; user and password of addresses; API keys, tokens of headers, private keys; and all those
values wherever else they were found. Of Secrets only names, keys and sizes were read. A secret of another shape, in a
log for example, cannot be told from other text: read the files before you send them to anybody.
"""


class NotWritten(PluginError):
    """The archive cannot be made where it was asked for."""


class Bundle:
    """Files in memory until `write`, because a secret that the last one shows must go from the first one, too."""

    def __init__(self, made: datetime) -> None:
        self._made = made
        self._objects: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._left_out: list[tuple[str, str]] = []

    def add_object(self, path: str, value: Any) -> None:
        """As JSON."""
        self._objects[path] = value

    def add_text(self, path: str, text: str) -> None:
        self._texts[path] = text

    def leave_out(self, what: str, why: str) -> None:
        self._left_out.append((what, why))

    def files(self) -> dict[str, str]:
        """Path to clean content, the index first."""
        redactor = Redactor()
        for value in self._objects.values():
            redactor.learn(value)
        contents = {path: json.dumps(redactor.clean(value), indent=2) for path, value in self._objects.items()}
        contents |= {path: redactor.clean_text(text) for path, text in self._texts.items()}
        return {INDEX: redactor.clean_text(self._index(contents)), **dict(sorted(contents.items()))}

    def write(self, file: Path) -> None:
        """Readable by its owner alone. Raises NotWritten."""
        folder = file.name.removesuffix(".gz").removesuffix(".tgz").removesuffix(".tar")
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, OWNER_ALONE)
            with os.fdopen(handle, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as archive:
                for path, content in self.files().items():
                    self._append(archive, f"{folder}/{path}", content.encode())
        except OSError as error:
            raise NotWritten(
                f"The report cannot be written to {file}: {error.strerror}; choose another --output."
            ) from error

    def _append(self, archive: tarfile.TarFile, path: str, content: bytes) -> None:
        entry = tarfile.TarInfo(path)
        entry.size, entry.mode, entry.mtime = len(content), OWNER_ALONE, int(self._made.timestamp())
        archive.addfile(entry, io.BytesIO(content))

    def _index(self, contents: dict[str, str]) -> str:
        listed = "\n".join(f"- `{path}`, {len(content.encode())} bytes" for path, content in sorted(contents.items()))
        missing = "\n".join(f"- {what}: {why}" for what, why in self._left_out) or "Nothing that was looked for."
        return f"{HEAD.format(made=self._made)}\n## Files\n\n{listed}\n\n## Left out\n\n{missing}\n"
