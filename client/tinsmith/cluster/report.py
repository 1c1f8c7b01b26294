"""The content of a report. The index of a report names the parts that could not be read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from tinsmith.cli import installed_versions
from tinsmith.cluster.bundle import Bundle
from tinsmith.cluster.families import (
    INSTALLATION_SELECTOR,
    MANAGED_BY_OPERATOR,
    Family,
    Kind,
    Target,
    choose,
    list_readable,
    read_families,
)
from tinsmith.cluster.kubectl import Kubectl, KubectlFailed, PluginError
from tinsmith.cluster.manifests import Manifest, container_statuses, name_of, namespace_of
from tinsmith.cluster.status_tree import status_tree
from tinsmith.cluster.why import NamespaceFacts, concerns, explain
from tinsmith.console import Branch, draw

LOG_LINES = 5000
LOG_CHARACTERS = 2 * 1024 * 1024
"""The limit on the log of each container. Of a longer log, the end is kept."""

OTHER_KINDS = (
    "services",
    "networkpolicies.networking.k8s.io",
    "poddisruptionbudgets.policy",
    "endpointslices.discovery.k8s.io",
)
INSTALLATION = ("deployments.apps", "pods", "services", "configmaps", "networkpolicies.networking.k8s.io")
DEFINITIONS = ",".join(kind.resource for kind in Kind)

SIZES = (
    "{{range .items}}{{.metadata.namespace}}/{{.metadata.name}} {{.type}}"
    "{{range $key, $value := .data}} {{$key}}:{{len $value}}{{end}}{{println}}{{end}}"
)
"""A template that prints the lengths of values in base64 characters, but not the values."""

Progress = Callable[[str], None]


def collect(kubectl: Kubectl, target: Target | None, bundle: Bundle, progress: Progress) -> None:
    """Add all parts of a report. Raises KubectlMissing or ClusterUnreachable if no cluster can be reached."""
    _add_versions(kubectl, bundle)
    collector = _Collector(kubectl, bundle, progress)
    families = collector.families(target)
    collector.resources(families)
    collector.namespace_facts(families)
    for family in families:
        collector.logs_of(family.pods, _folder(family))
    collector.installation()
    collector.secrets()
    collector.definitions()


def _add_versions(kubectl: Kubectl, bundle: Bundle) -> None:
    """Add the versions.

    The versions come first, because their request fails at once if the cluster cannot be reached.
    """
    bundle.add_object("versions/client.json", installed_versions())
    try:
        bundle.add_text("versions/cluster.json", kubectl.text("version", "--output=json"))
    except KubectlFailed as error:
        bundle.leave_out("the cluster's version", str(error))


class _Collector:
    """A collector with a method for each part of the report. For a missing part, the bundle contains the reason."""

    def __init__(self, kubectl: Kubectl, bundle: Bundle, progress: Progress) -> None:
        self._kubectl = kubectl
        self._bundle = bundle
        self._progress = progress
        self._now = datetime.now(UTC)

    def families(self, target: Target | None) -> tuple[Family, ...]:
        """Return the families.

        Raises NotFound and Misused for a wrong name, because a wrong name is a mistake of the user and not a missing
        part.
        """
        try:
            seen = read_families(self._kubectl)
        except PluginError as error:
            self._bundle.leave_out("sessions and pools", str(error))
            return ()
        self._leave_out(seen.unread)
        return seen.families if target is None else (choose(seen.families, target),)

    def resources(self, families: Iterable[Family]) -> None:
        self._progress("reading resources")
        families = tuple(families)
        for family in families:
            for member in family.members:
                self._add(member, _folder(family))
        self._bundle.add_text("status.txt", _text(status_tree(families, self._now, with_namespaces=True)))
        if families:
            items, unread = list_readable(self._kubectl, OTHER_KINDS, MANAGED_BY_OPERATOR)
            self._leave_out(unread)
            for item in items:
                self._add(item, f"{namespace_of(item)}/others")

    def namespace_facts(self, families: Iterable[Family]) -> None:
        found, unread = list_readable(self._kubectl, ("events", "resourcequotas"), None)
        self._leave_out(unread)
        events = tuple(item for item in found if item["kind"] == "Event")
        quotas = tuple(item for item in found if item["kind"] == "ResourceQuota")
        for quota in quotas:
            self._add(quota, f"{namespace_of(quota)}/quotas")
        for family in families:
            own_events = [event for event in events if concerns(family, event)]
            self._bundle.add_object(f"{_folder(family)}/events.json", own_events)
            answer = explain(family, NamespaceFacts(events=tuple(own_events), quotas=quotas), self._now)
            self._bundle.add_text(f"{_folder(family)}/why.txt", _text(answer))

    def logs_of(self, pods: Iterable[Manifest], folder: str) -> None:
        for pod in pods:
            self._progress(f"reading logs of {name_of(pod)}")
            for container in container_statuses(pod):
                self._log(pod, container["name"], folder, previous=False)
                if container.get("restartCount", 0):
                    self._log(pod, container["name"], folder, previous=True)

    def installation(self) -> None:
        """Add the operator and the API server from all namespaces that the user may read."""
        found, unread = list_readable(self._kubectl.everywhere(), INSTALLATION, INSTALLATION_SELECTOR)
        if unread:
            found, unread = list_readable(self._kubectl, INSTALLATION, INSTALLATION_SELECTOR)
            self._bundle.leave_out("an installation in another namespace", "your rights do not show other namespaces")
        self._leave_out(unread)
        if not found:
            self._bundle.leave_out("the installation", f"nothing is labelled {INSTALLATION_SELECTOR} here")
        for manifest in found:
            self._add(manifest, f"{namespace_of(manifest)}/installation")
        for pod in (manifest for manifest in found if manifest["kind"] == "Pod"):
            self.logs_of([pod], f"{namespace_of(pod)}/installation")

    def secrets(self) -> None:
        """Add the names, keys and sizes of Secrets."""
        for name, selector in (("workers", MANAGED_BY_OPERATOR), ("installation", INSTALLATION_SELECTOR)):
            words = ("get", "secrets", *self._kubectl.scope, f"--selector={selector}", f"--output=go-template={SIZES}")
            self._text_of(f"secrets of the {name}", f"secrets/{name}.txt", self._kubectl, *words)

    def definitions(self) -> None:
        words = ("get", "customresourcedefinitions", *DEFINITIONS.split(","), "--output=json", "--ignore-not-found")
        self._text_of("the definitions of the resources", "versions/definitions.json", self._kubectl, *words)

    def _log(self, pod: Manifest, container: str, folder: str, *, previous: bool) -> None:
        suffix = "previous.log" if previous else "log"
        words = ("logs", name_of(pod), f"--container={container}", f"--tail={LOG_LINES}", "--timestamps")
        self._text_of(
            f"the {suffix} of {name_of(pod)}, container {container}",
            f"{folder}/{name_of(pod)}.{container}.{suffix}",
            self._kubectl.within(namespace_of(pod)),
            *words,
            *(["--previous"] if previous else []),
        )

    def _text_of(self, subject: str, path: str, kubectl: Kubectl, *words: str) -> None:
        try:
            text = kubectl.text(*words)
        except PluginError as error:
            self._bundle.leave_out(subject, str(error))
            return
        if len(text) > LOG_CHARACTERS:
            self._bundle.leave_out(
                f"the beginning of {subject}", f"only the newest {LOG_CHARACTERS} characters are kept"
            )
            text = text[-LOG_CHARACTERS:].partition("\n")[2]
        self._bundle.add_text(path, text)

    def _add(self, manifest: Manifest, folder: str) -> None:
        self._bundle.add_object(f"{folder}/{manifest['kind'].lower()}-{name_of(manifest)}.json", manifest)

    def _leave_out(self, unread: Iterable[str]) -> None:
        for sentence in unread:
            subject, _, why = sentence.partition(": ")
            self._bundle.leave_out(subject, why)


def _folder(family: Family) -> str:
    return f"{family.namespace}/{family.kind.word}-{family.name}"


def _text(branches: Iterable[Branch]) -> str:
    return "".join(f"{line.plain}\n" for line in draw(branches))
