"""The mistakes that people make in a server's URL, told from how it is written."""

from __future__ import annotations

from dataclasses import dataclass

import httpx

API_PATH = "/api/v1"


@dataclass(frozen=True, slots=True)
class Mistake:
    detail: str
    cure: str


def find_mistake(url: str) -> Mistake | None:
    """None when a request can be sent there, which says nothing about who answers."""
    if "://" not in url:
        return Mistake(f"{url} has no http:// or https://", f"put http:// in front: http://{url}")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return Mistake(f"{url} is not a URL: {error}", "write it as http://HOST:PORT")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        return Mistake(f"{url} is not an http URL", "write it as http://HOST:PORT")
    bare = url.rstrip("/")
    if bare.endswith(API_PATH):
        cure = f"leave out {API_PATH}, which the SDK adds: {bare.removesuffix(API_PATH)}"
        return Mistake(f"{url} ends in {API_PATH}", cure)
    return None
