"""Which namespaces an operator watches."""

from __future__ import annotations

import re
from dataclasses import dataclass

CLUSTER = "*"
# RFC 1123, as Kubernetes checks names of namespaces.
NAMESPACE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Scope:
    """namespaces: exactly these; None is the whole cluster, which takes cluster-wide rights."""

    namespaces: tuple[str, ...] | None

    @property
    def is_cluster(self) -> bool:
        return self.namespaces is None

    @property
    def parts(self) -> tuple[str | None, ...]:
        """What is listed and watched, each by itself; None is all namespaces at once."""
        return (None,) if self.namespaces is None else self.namespaces

    def part_of(self, namespace: str) -> str | None:
        """In which of the parts a namespace lies."""
        return None if self.is_cluster else namespace


def parse_scope(text: str, own: str) -> Scope:
    """`*` is the cluster, `a,b` are these two, nothing is the release's own. Raises ValueError."""
    if text.strip() == CLUSTER:
        return Scope(None)
    names = [name.strip() for name in text.split(",") if name.strip()] or [own]
    for name in names:
        if not NAMESPACE_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not the name of a namespace: write names with commas between them, `*` alone for the "
                "whole cluster, or nothing for the release's own"
            )
    return Scope(tuple(dict.fromkeys(names)))
