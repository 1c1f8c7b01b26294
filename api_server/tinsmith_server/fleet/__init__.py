"""Fleets: the workers of a server, and the connections to these workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tinsmith_server.errors import StartupError
from tinsmith_server.settings import Settings

if TYPE_CHECKING:
    from tinsmith_server.fleet.base import Fleet


def fleet_of(settings: Settings, on_progress: Callable[[str], None] = lambda _: None) -> Fleet:
    """Return the fleet that the settings name. `on_progress` is called with the progress while models load.

    Only the packages of the chosen kind of fleet are imported, because the other packages may not be installed. Raises
    StartupError if a model directory is missing, or if there is no model to serve.
    """
    if settings.fleet == "kubernetes":
        from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet

        return KubernetesFleet(settings)
    if not settings.models:
        raise StartupError(
            "no model to serve: set --model NAME[=PATH] (setting models), or create one with `tinsmith make-tiny-model`"
        )
    from tinsmith_server.fleet.local.fleet import LocalFleet

    return LocalFleet(settings, on_progress)
