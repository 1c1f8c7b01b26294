"""The archive that `kubectl tinsmith report` writes, without secrets."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tinsmith.cluster.kubectl import PluginError

REMOVED = "<removed>"
"""The replacement for a secret. The replacement is a single word, so that a second cleaning changes nothing."""

SHORTEST_LEARNED = 4
"""The minimum length of a secret. A shorter value could also occur in other texts by chance."""

_NEVER_LEARNED = frozenset({"true", "false", "none", "null"})
_USELESS_FIELDS = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
"""Fields that repeat the whole object as text."""

_NAMES = (
    r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key"
    r"|credentials?|authorization|auth)"
)
_SECRET_FIELD = re.compile(rf"{_NAMES}$", re.IGNORECASE)
_SECRET_ARGUMENT = re.compile(rf"--?[\w-]*{_NAMES}$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|PASS|PWD|SECRET|CREDENTIAL|AUTH", re.IGNORECASE)
_NAME_OF_A_SECRET = re.compile(r"TINSMITH_\w+_SECRET")
"""Variables that contain the name of a Secret. The name of a Secret is not secret."""

_ADDRESS = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s\"'<>]*)@")
"""The credentials in an address.

The pattern matches up to the last @ of a word, because a password may contain an @.
"""

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_END_OF_A_PRIVATE_KEY = re.compile(
    r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]+\s*(?:\\r|\\n|\s)+)*-----END [A-Z0-9 ]*PRIVATE KEY-----"
)
"""The end of a private key, without the beginning, which a shortened log may have lost."""

_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (_ADDRESS, rf"\g<1>{REMOVED}@"),
    (re.compile(r"\b(Bearer|Basic|Digest)[ \t]+[^\s\"',;]+", re.IGNORECASE), rf"\g<1> {REMOVED}"),
    # name=value, name: value, "name": "value" (also inside a string), --name value.
    (
        re.compile(
            rf"({_NAMES}\\?[\"']?[ \t]*[:=][ \t]*|(?<![\w-])--[\w-]*?{_NAMES}[ \t]+)"
            r"(\\\"(?:(?!\\\").)*\\\"|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|[^\s,;&\"'})\]]+)",
            re.IGNORECASE,
        ),
        rf"\g<1>{REMOVED}",
    ),
    (re.compile(r"tml-[A-Za-z0-9_.~+/=-]+"), REMOVED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]*)?"), REMOVED),
    (re.compile(r"\bhf_[A-Za-z0-9]{8,}"), REMOVED),
    (re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"), REMOVED),
    (re.compile(r"\bAGE-SECRET-KEY-1[A-Z0-9]+", re.IGNORECASE), REMOVED),
)


class Redactor:
    """A filter that removes secrets. Pass all objects to `learn` before you clean a text."""

    def __init__(self) -> None:
        self._learned: set[str] = set()

    def learn(self, value: Any) -> None:
        """Remember the values of variables, fields and arguments that have the name of a secret."""
        for secret in _secrets_in(value):
            if len(secret) >= SHORTEST_LEARNED and secret.lower() not in _NEVER_LEARNED:
                # A value is removed in three forms: plain, as part of a JSON string, and as part of an address.
                self._learned |= {secret, json.dumps(secret)[1:-1], quote(secret, safe="")}

    def clean(self, value: Any) -> Any:
        """Return a copy of the object without secrets. In an address, only the credentials are replaced."""
        if isinstance(value, str):
            return self.clean_text(value)
        if isinstance(value, list):
            secret = set(_secret_places(value))
            return [REMOVED if place in secret else self.clean(item) for place, item in enumerate(value)]
        if isinstance(value, dict):
            return self._clean_fields(value)
        return value

    def clean_text(self, text: str) -> str:
        for learned in sorted(self._learned, key=len, reverse=True):
            text = text.replace(learned, REMOVED)
        if "PRIVATE KEY-----" in text:
            text = _END_OF_A_PRIVATE_KEY.sub(REMOVED, _PRIVATE_KEY.sub(REMOVED, text))
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement, text)
        return text

    def _clean_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        secret = set(_secret_fields(fields))
        return {
            self.clean_text(name): REMOVED if name in secret else self.clean(value)
            for name, value in fields.items()
            if name not in _USELESS_FIELDS
        }


def _secrets_in(value: Any) -> Iterator[str]:
    """Yield the secret values of the object, at any depth."""
    if isinstance(value, str):
        yield from _credentials_in(value)
    elif isinstance(value, list):
        yield from (value[place] for place in _secret_places(value))
        for item in value:
            yield from _secrets_in(item)
    elif isinstance(value, dict):
        yield from (value[name] for name in _secret_fields(value))
        for item in value.values():
            yield from _secrets_in(item)


def _secret_fields(fields: dict[str, Any]) -> Iterator[str]:
    """Yield the names of fields that contain a secret.

    The `value` of a variable is a secret if the variable has the name of a secret.
    """
    for name, value in fields.items():
        if isinstance(value, str) and _SECRET_FIELD.search(name):
            yield name
    variable = fields.get("name")
    if isinstance(variable, str) and isinstance(fields.get("value"), str) and _is_secret_variable(variable):
        yield "value"


def _is_secret_variable(name: str) -> bool:
    return _SECRET_VARIABLE.search(name) is not None and _NAME_OF_A_SECRET.fullmatch(name) is None


def _secret_places(items: list[Any]) -> Iterator[int]:
    """Yield the positions of arguments that follow an option with the name of a secret."""
    for place in range(1, len(items)):
        option, value = items[place - 1], items[place]
        if isinstance(option, str) and isinstance(value, str) and _SECRET_ARGUMENT.fullmatch(option):
            yield place


def _credentials_in(text: str) -> Iterable[str]:
    """Yield `user:password` and the password of each address, because another text may contain only the password."""
    for found in _ADDRESS.finditer(text):
        user, colon, password = found[2].partition(":")
        yield found[2]
        yield password if colon else user


INDEX = "INDEX.md"
OWNER_ALONE = 0o600

HEAD = f"""# A report of Tinsmith

Made {{created_at:%Y-%m-%dT%H:%M:%SZ}} by `kubectl tinsmith report`.

`{REMOVED}` replaces the values of variables, fields and options that are named like a password, a key or a token;
users and passwords in addresses; API keys, tokens in headers and private keys; and these values wherever else they
occur. Of Secrets, only names, keys and sizes were read. A secret in another form, for example in a log, cannot be
recognized: read the files before you send them.
"""


class NotWritten(PluginError):
    """An error for an archive that cannot be written to the given path."""


class Bundle:
    """The files of a report.

    The files stay in memory until `write`, because the last file may reveal that a text in the first file is a secret.
    """

    def __init__(self, created_at: datetime) -> None:
        self._created_at = created_at
        self._objects: dict[str, Any] = {}
        self._texts: dict[str, str] = {}
        self._left_out: list[tuple[str, str]] = []

    def add_object(self, path: str, value: Any) -> None:
        """Add an object as JSON."""
        self._objects[path] = value

    def add_text(self, path: str, text: str) -> None:
        self._texts[path] = text

    def leave_out(self, part: str, why: str) -> None:
        self._left_out.append((part, why))

    def files(self) -> dict[str, str]:
        """Return the clean content of each path. The first path is the index."""
        redactor = Redactor()
        for value in self._objects.values():
            redactor.learn(value)
        contents = {path: json.dumps(redactor.clean(value), indent=2) for path, value in self._objects.items()}
        contents |= {path: redactor.clean_text(text) for path, text in self._texts.items()}
        return {INDEX: redactor.clean_text(self._index(contents)), **dict(sorted(contents.items()))}

    def write(self, file: Path) -> None:
        """Write the archive. Only the user who owns the file can read the archive. Raises NotWritten."""
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
        entry.size, entry.mode, entry.mtime = len(content), OWNER_ALONE, int(self._created_at.timestamp())
        archive.addfile(entry, io.BytesIO(content))

    def _index(self, contents: dict[str, str]) -> str:
        listed = "\n".join(f"- `{path}`, {len(content.encode())} bytes" for path, content in sorted(contents.items()))
        missing = "\n".join(f"- {part}: {why}" for part, why in self._left_out) or "Nothing that was looked for."
        return f"{HEAD.format(created_at=self._created_at)}\n## Files\n\n{listed}\n\n## Left out\n\n{missing}\n"
