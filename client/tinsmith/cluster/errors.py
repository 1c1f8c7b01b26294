"""What can go wrong between a person and a cluster: one sentence each, with what to do."""

from __future__ import annotations

from typing import ClassVar


class PluginError(Exception):
    """Ends a command with its sentence on standard error."""

    exit_status: ClassVar[int] = 1


class Misused(PluginError):
    """The command line cannot mean anything; nothing was asked of the cluster, or nothing was changed in it."""

    exit_status: ClassVar[int] = 2


class KubectlMissing(PluginError):
    """There is no kubectl to run."""


class ClusterUnreachable(PluginError):
    """No API server answers, or it does not know who asks."""


class KindUnknown(PluginError):
    """The cluster has no such kind of resource."""


class Forbidden(PluginError):
    """The user's rights are not enough for this request."""


class NotFound(PluginError):
    """An object of that name is not there."""


class KubectlFailed(PluginError):
    """kubectl said something else; the sentence quotes it."""


class DidNotHappen(PluginError):
    """What was waited for has not come, or cannot come any more."""
