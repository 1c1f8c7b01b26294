"""What `tinsmith serve` says beside its log. Standard output holds one line, the URL, for scripts that wait for it."""

from __future__ import annotations

import sys
from pathlib import Path

from tinsmith_server.services.keys import NewKey


def announce(url: str, first_key: NewKey | None, public_url: str | None) -> None:
    """Once the server answers. A key that was just made is shown here and never again."""
    on_terminal = sys.stderr.isatty()
    if first_key is not None and not on_terminal:
        _say(f"API key, shown only this once: {first_key.secret}")
    print(url, flush=True)
    if first_key is not None and on_terminal:
        _say("An API key was made, and is shown only this once. For your programs:")
        _say(f"export TINKER_BASE_URL={public_url or url} TINKER_API_KEY={first_key.secret}")


def say_stopped(data: Path) -> None:
    """After a clean stop. Only a person waits for it."""
    if sys.stderr.isatty():
        _say(f"stopped; everything is kept in {data}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
