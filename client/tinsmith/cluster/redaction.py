"""Taking secrets out of what leaves the cluster.

Three ways, because none is enough: fields whose names say that they hold a secret; text that looks like one; and the
values found in the first way wherever else they turn up. In doubt something harmless is taken out, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

REMOVED = "<removed>"
"""One word, so that cleaning what is clean changes nothing."""

SHORTEST_LEARNED = 4
"""Shorter values turn up everywhere by chance."""

_NEVER_LEARNED = frozenset({"true", "false", "none", "null"})
_USELESS_FIELDS = frozenset({"managedFields", "kubectl.kubernetes.io/last-applied-configuration"})
"""They say again, as text, what the object says, and nobody reads them there."""

_NAMES = (
    r"(?:pass(?:word|wd|phrase)?|pwd|secret|token|api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key"
    r"|credentials?|authorization|auth)"
)
_SECRET_FIELD = re.compile(rf"{_NAMES}$", re.IGNORECASE)
_SECRET_ARGUMENT = re.compile(rf"--?[\w-]*{_NAMES}$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(r"KEY|TOKEN|PASS|PWD|SECRET|CREDENTIAL|AUTH", re.IGNORECASE)
_NAME_OF_A_SECRET = re.compile(r"TINSMITH_\w+_SECRET")
"""A setting of ours that says which Secret holds something."""

_ADDRESS = re.compile(r"\b([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s\"'<>]*)@")
"""Up to the last @ of the word: passwords may hold that character."""

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\Z)", re.DOTALL
)
_END_OF_A_PRIVATE_KEY = re.compile(
    r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]+\s*(?:\\r|\\n|\s)+)*-----END [A-Z0-9 ]*PRIVATE KEY-----"
)
"""The beginning was cut off with the log."""

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
    """Learns from objects, so all of them must be shown to `learn` before anything is cleaned."""

    def __init__(self) -> None:
        self._learned: set[str] = set()

    def learn(self, value: Any) -> None:
        """Remembers the values of variables, fields and arguments that are secret by their name."""
        for secret in _secrets_in(value):
            if len(secret) >= SHORTEST_LEARNED and secret.lower() not in _NEVER_LEARNED:
                # As it is, inside a string of JSON, and inside an address.
                self._learned |= {secret, json.dumps(secret)[1:-1], quote(secret, safe="")}

    def clean(self, value: Any) -> Any:
        """The same object without secrets. Of addresses the rest stays."""
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
    """At any depth."""
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
    """Names of the fields that are nothing but a secret; `value` of a variable, by the variable's name."""
    for name, value in fields.items():
        if isinstance(value, str) and _SECRET_FIELD.search(name):
            yield name
    variable = fields.get("name")
    if isinstance(variable, str) and isinstance(fields.get("value"), str) and _is_secret_variable(variable):
        yield "value"


def _is_secret_variable(name: str) -> bool:
    return _SECRET_VARIABLE.search(name) is not None and _NAME_OF_A_SECRET.fullmatch(name) is None


def _secret_places(items: list[Any]) -> Iterator[int]:
    """Of arguments that follow an option with a secret's name."""
    for place in range(1, len(items)):
        option, value = items[place - 1], items[place]
        if isinstance(option, str) and isinstance(value, str) and _SECRET_ARGUMENT.fullmatch(option):
            yield place


def _credentials_in(text: str) -> Iterable[str]:
    """Of addresses: the password, and the user with it, as they may be quoted elsewhere."""
    for found in _ADDRESS.finditer(text):
        user, colon, password = found[2].partition(":")
        yield found[2]
        yield password if colon else user
