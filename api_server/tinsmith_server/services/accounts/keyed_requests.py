"""Requests that come with an idempotency key: a repeat is known by the key, and another request is told from a repeat.

The key is looked up in a column and enters no hash, name or path: texts that tenants choose stay apart in the store.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from tinsmith_server.errors import Unprocessable
from tinsmith_server.store.records import Session


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """An idempotency key, with the digest of the request that it came with."""

    key: str
    digest: str


def keyed_request(key: str | None, content: object) -> KeyedRequest | None:
    """Return the request's identity; `content` is all that the request says, as JSON. None without a key."""
    if key is None:
        return None
    return KeyedRequest(key, hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest())


def check_repeats(made: Session, request: KeyedRequest) -> None:
    """Raise Unprocessable where another request made the session of this key. The SDK repeats a 409 for minutes."""
    if made.request_digest != request.digest:
        raise Unprocessable(
            f"the idempotency key {request.key.partition(':')[2]!r} has come with another request: "
            "send each request with a key of its own"
        )
