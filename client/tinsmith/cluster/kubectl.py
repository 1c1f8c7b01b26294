"""Calls of the user's own kubectl, and exceptions for the errors of kubectl.

Every request to a cluster goes through kubectl.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from tinsmith.cluster.manifests import Manifest


class PluginError(Exception):
    """An error that ends a command. The message of the error is printed on standard error."""

    exit_status: ClassVar[int] = 1


class Misused(PluginError):
    """An error in the command line, which is raised before anything in the cluster is changed."""

    exit_status: ClassVar[int] = 2


class KubectlMissing(PluginError):
    """An error if kubectl is not installed."""


class ClusterUnreachable(PluginError):
    """An error if no API server answers, or if the API server does not accept the login."""


class KindUnknown(PluginError):
    """An error for a kind of resource that the cluster does not have."""


class Forbidden(PluginError):
    """An error for a request that the user has no right to send."""


class NotFound(PluginError):
    """An error for an object that does not exist."""


class KubectlFailed(PluginError):
    """Any other error of kubectl, with a message that quotes kubectl."""


class RequestFailed(PluginError):
    """An error for a request that was not completed in time or cannot be completed."""


_KIND_UNKNOWN = re.compile(r"the server doesn't have a resource type \"?([\w.-]+)|no matches for kind \"?([\w.-]+)")
_UNREACHABLE = re.compile(
    r"unable to connect to the server|was refused|no such host|i/o timeout|connection reset|tls: |x509: "
    r"|couldn't get current server API group list|current-context|context .* does not exist|context was not found"
    r"|no configuration has been provided|invalid configuration|stat .*no such file",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"must be logged in|\(Unauthorized\)|getting credentials", re.IGNORECASE)
_FROM_SERVER = re.compile(r"Error from server \((?P<reason>\w+)\): (?P<words>.*)", re.DOTALL)
_LOG_LINE = re.compile(r"^[EWI]\d{4} \d\d:\d\d:\d\d\.\d+ .*$\n?", re.MULTILINE)
"""Log lines of kubectl's library. The error itself is in the last line, which has no timestamp."""


@dataclass(frozen=True, slots=True)
class Access:
    """The cluster and namespace to use. If a field is None, the value in the kubeconfig is used."""

    context: str | None = None
    namespace: str | None = None
    kubeconfig: str | None = None

    @property
    def words(self) -> list[str]:
        options = {"context": self.context, "namespace": self.namespace, "kubeconfig": self.kubeconfig}
        return [f"--{option}={value}" for option, value in options.items() if value is not None]


class Kubectl:
    """A runner of kubectl. Every method raises a PluginError if kubectl fails."""

    def __init__(self, access: Access | None = None, *, all_namespaces: bool = False, program: str = "kubectl") -> None:
        self._access = access or Access()
        self._all_namespaces = all_namespaces
        self._program = program

    def within(self, namespace: str) -> Kubectl:
        """Return a runner for the same cluster and one namespace."""
        access = Access(self._access.context, namespace, self._access.kubeconfig)
        return Kubectl(access, program=self._program)

    def everywhere(self) -> Kubectl:
        """Return a runner for the same cluster and all namespaces."""
        return Kubectl(self._access, all_namespaces=True, program=self._program)

    @property
    def scope(self) -> list[str]:
        """Return the option of `kubectl get` for the chosen namespaces."""
        return ["--all-namespaces"] if self._all_namespaces else []

    def find(self, resources: str, selector: str | None = None) -> list[Manifest]:
        """Return all objects of these kinds (`pods,services`) in the chosen namespaces."""
        chosen = [f"--selector={selector}"] if selector is not None else []
        answer: Manifest = json.loads(self.text("get", resources, *self.scope, *chosen, "--output=json"))
        items: list[Manifest] = answer["items"]
        return items

    def get(self, resource: str, name: str) -> Manifest:
        found: Manifest = json.loads(self.text("get", resource, name, "--output=json"))
        return found

    def merge_patch(self, resource: str, name: str, patch: Manifest) -> Manifest:
        """Apply a merge patch and return the changed object."""
        words = ("patch", resource, name, "--type=merge", f"--patch={json.dumps(patch)}", "--output=json")
        patched: Manifest = json.loads(self.text(*words))
        return patched

    def text(self, *words: str) -> str:
        """Return kubectl's standard output."""
        finished = self._run(words, captures=True)
        if finished.returncode != 0:
            _raise(finished.stderr.decode(errors="replace"))
        return finished.stdout.decode(errors="replace")

    def run_attached(self, *words: str) -> int:
        """Run kubectl attached to the terminal, and return its exit status."""
        return self._run(words, captures=False).returncode

    def _run(self, words: Sequence[str], *, captures: bool) -> subprocess.CompletedProcess[bytes]:
        try:
            return subprocess.run(
                [self._program, *self._access.words, *words],
                stdin=subprocess.DEVNULL if captures else None,
                capture_output=captures,
                check=False,
            )
        except (FileNotFoundError, PermissionError) as error:
            raise KubectlMissing(
                f"{self._program} is not on the PATH or is not executable; install kubectl, which this command "
                "uses to reach the cluster."
            ) from error


def _raise(stderr: str) -> NoReturn:
    raise error_from(stderr)


def error_from(stderr: str) -> PluginError:
    """Return the error that kubectl's standard error describes."""
    words = " ".join(_LOG_LINE.sub("", stderr).split()).removeprefix("error: ") or "it gave no reason"
    if unknown := _KIND_UNKNOWN.search(words):
        return KindUnknown(
            f"The cluster knows no {unknown[1] or unknown[2]}; install Tinsmith's chart there, or choose another "
            "cluster with --context."
        )
    if _LOGIN.search(words):
        return ClusterUnreachable(
            f"The cluster does not accept your login: {_quoted(words)}; log in, or choose --context."
        )
    if from_server := _FROM_SERVER.search(words):
        return _from_server(from_server["reason"], from_server["words"])
    if _UNREACHABLE.search(words):
        return ClusterUnreachable(
            f"No cluster answers: {_quoted(words)}; start it, or choose one with --context or --kubeconfig."
        )
    return KubectlFailed(f"kubectl failed: {_quoted(words)}.")


def _from_server(reason: str, words: str) -> PluginError:
    match reason:
        case "Forbidden":
            return Forbidden(
                f"Your rights do not allow it: {_quoted(words)}; docs/reference/kubectl.md lists what to request."
            )
        case "NotFound":
            return NotFound(f"{_quoted(words)}.")
        case _:
            return KubectlFailed(f"The API server refused it ({reason}): {_quoted(words)}.")


def _quoted(words: str) -> str:
    return words.strip().rstrip(".")
