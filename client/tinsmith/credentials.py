"""The server's address and the user's key, as the environment gives them."""

from __future__ import annotations

import os
import string

BASE_URL_VARIABLE = "TINKER_BASE_URL"
LOCAL_SERVER = "http://127.0.0.1:8000"

API_KEY_VARIABLE = "TINKER_API_KEY"
NAMES = {"\n": "a newline", "\r": "a carriage return", "\t": "a tab", " ": "a space"}
LAST_ASCII = 0x7F
PRINTABLE = range(0x21, LAST_ASCII)


class UnusableKey(ValueError):
    """A key that no request can carry. `str(error)` says where it is wrong, and what to do."""


def api_key_from_environment() -> str | None:
    """Raises UnusableKey."""
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    check_key(api_key)
    return api_key


def check_key(api_key: str | None) -> None:
    """Raises UnusableKey."""
    if (mistake := find_key_mistake(api_key)) is not None:
        raise UnusableKey(f"{mistake}; {cure_of(api_key)}")


def find_key_mistake(api_key: str | None) -> str | None:
    """Return what keeps a key from being sent in a header, without the key itself."""
    for place, character in enumerate(api_key or "", start=1):
        if ord(character) not in PRINTABLE:
            return f"{API_KEY_VARIABLE} has {_named(character)} as character {place} of {len(api_key or '')}"
    return None


def _named(character: str) -> str:
    if ord(character) > LAST_ASCII:
        return "a character that is not ASCII"
    return NAMES.get(character, "a control character")


def cure_of(api_key: str | None) -> str:
    if find_key_mistake((api_key or "").strip(string.whitespace)) is None:
        # `echo` keeps a carriage return, and in zsh spaces too.
        bare = f"""$(printf %s "${API_KEY_VARIABLE}" | tr -d '[:space:]')"""
        return f'export it without white space: export {API_KEY_VARIABLE}="{bare}"'
    return "copy the key again: it has letters, digits and signs of ASCII alone, and no spaces"


def base_url_from_environment() -> str:
    return os.environ.get(BASE_URL_VARIABLE) or LOCAL_SERVER
