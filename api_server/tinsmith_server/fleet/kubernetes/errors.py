"""What goes wrong between this server and the Kubernetes API."""

from __future__ import annotations

from tinsmith_server.errors import TinsmithError


class KubernetesError(TinsmithError):
    """Base of what the Kubernetes API answers instead of what was asked."""


class ApiUnavailable(KubernetesError):
    """It does not answer, or not now. Worth another try."""


class ApiRefused(KubernetesError):
    """It says no, in its own words: not allowed, not known, not valid, over quota."""


class AlreadyThere(KubernetesError):
    """An object of this name exists."""


class HistoryGone(KubernetesError):
    """A watch wants to go on where the API no longer remembers."""
