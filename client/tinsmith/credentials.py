"""The server's address and the user's key, from environment variables."""

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
    """An error for a key that cannot be sent in a request.

    `str(error)` says what is wrong with the key, where the key was found, and how to fix the key.
    """


def api_key_from_environment() -> str | None:
    """Return the key, or None if no key is set. Raises UnusableKey."""
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    check_key(api_key)
    return api_key


def check_key(api_key: str | None) -> None:
    """Raise UnusableKey if the key cannot be sent in a request."""
    if (mistake := find_key_mistake(api_key)) is not None:
        raise UnusableKey(f"{mistake}; {cure_of(api_key)}")


def find_key_mistake(api_key: str | None) -> str | None:
    """Return why the key cannot be sent in a header, or None if the key is usable.

    The text does not contain the key.
    """
    for place, character in enumerate(api_key or "", start=1):
        if ord(character) not in PRINTABLE:
            return f"{API_KEY_VARIABLE} has {_named(character)} as character {place} of {len(api_key or '')}"
    return None


def _named(character: str) -> str:
    """Return a printable name of the character."""
    if ord(character) > LAST_ASCII:
        return "a character that is not ASCII"
    return NAMES.get(character, "a control character")


def cure_of(api_key: str | None) -> str:
    """Return how to fix a key that cannot be used."""
    if find_key_mistake((api_key or "").strip(string.whitespace)) is None:
        # `echo` keeps a carriage return, and zsh keeps spaces.
        bare = f"""$(printf %s "${API_KEY_VARIABLE}" | tr -d '[:space:]')"""
        return f'export it without white space: export {API_KEY_VARIABLE}="{bare}"'
    return "copy the key again: it must contain only ASCII letters, digits and signs, and no spaces"


def base_url_from_environment() -> str:
    """Return the address in TINKER_BASE_URL, or the default address of a local server."""
    return os.environ.get(BASE_URL_VARIABLE) or LOCAL_SERVER
