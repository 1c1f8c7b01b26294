"""The namespaces of a fleet: the server's own, a list of them, or all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from tinsmith_server.errors import StartupError
from tinsmith_server.settings import EVERY_NAMESPACE


@dataclass(frozen=True, slots=True)
class Scope:
    """`namespaces` is None for the whole cluster. `home` is where this server makes sessions by itself."""

    namespaces: tuple[str, ...] | None
    home: str | None

    def covers(self, namespace: str) -> bool:
        return self.namespaces is None or namespace in self.namespaces

    @property
    def watched(self) -> tuple[str | None, ...]:
        """What to list and to watch, one after the other."""
        return (None,) if self.namespaces is None else self.namespaces

    @override
    def __str__(self) -> str:
        if self.namespaces is None:
            return "any namespace"
        if len(self.namespaces) == 1:
            return f"namespace {self.namespaces[0]}"
        return f"the namespaces {', '.join(self.namespaces)}"


def scope_of(chosen: Sequence[str], own: str | None) -> Scope:
    """What was chosen, for a server that runs in the namespace `own`. Raises StartupError when there is neither."""
    if tuple(chosen) == (EVERY_NAMESPACE,):
        return Scope(None, own)
    namespaces = tuple(chosen) or ((own,) if own is not None else ())
    if not namespaces:
        raise StartupError(
            "this server does not run in a Kubernetes pod: set fleet_namespaces to the namespaces of its fleet"
        )
    return Scope(namespaces, own if own in namespaces else namespaces[0])
