"""Where workers live, and how to speak to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tinsmith_server.errors import StartupError
from tinsmith_server.settings import Settings

if TYPE_CHECKING:
    from tinsmith_server.fleet.base import Fleet


def fleet_of(settings: Settings, tell: Callable[[str], None] = lambda _: None) -> Fleet:
    """The one that the settings name. Raises StartupError when a model directory or the catalogue is missing, and where
    there is nothing to serve.

    `tell` hears what a person at a terminal wants to know while models are loaded. Each fleet has imports that the
    other has no use for, and perhaps no packages.
    """
    if settings.fleet == "kubernetes":
        from tinsmith_server.fleet.kubernetes.fleet import KubernetesFleet

        return KubernetesFleet(settings)
    if not settings.models:
        raise StartupError(
            "no model to serve: give --model NAME[=PATH] (setting models), or make one with `tinsmith make-tiny-model`"
        )
    from tinsmith_server.fleet.local.fleet import LocalFleet

    return LocalFleet(settings, tell)
