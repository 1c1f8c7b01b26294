"""References to images, read as container runtimes read them."""

from __future__ import annotations


def repository_of(reference: str) -> str:
    """Without tag and digest, in full: `team/trainer:1` is `docker.io/team/trainer`."""
    name = as_written(reference)
    first, slash, rest = name.partition("/")
    is_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
    if is_host and first != "docker.io":
        return name
    path = rest if is_host else name
    return f"docker.io/{path}" if "/" in path else f"docker.io/library/{path}"


def as_written(reference: str) -> str:
    """The repository, without tag and digest, and otherwise as somebody wrote it."""
    name = reference.partition("@")[0]
    head, slash, last = name.rpartition("/")
    return f"{head}{slash}{last.partition(':')[0]}"
