"""What the builders and decisions must know of the installation they work for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tinsmith_operator.policy import ANY, Policy, Reserved

API_SERVER_LABELS: Mapping[str, str] = {
    "app.kubernetes.io/name": "tinsmith",
    "app.kubernetes.io/component": "api-server",
}
OPERATOR_LABELS: Mapping[str, str] = {
    "app.kubernetes.io/name": "tinsmith",
    "app.kubernetes.io/component": "operator",
}


ENDPOINT_VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""By which a store other than Amazon's is reached, as botocore reads them: the first one that is set."""

HTTP_PORT = 80
HTTPS_PORT = 443


def remote_port(environment: Mapping[str, str]) -> int:
    """Of the object store that these variables name. Raises ValueError when they name none that could be reached."""
    endpoint = next((environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    if endpoint is None:
        return HTTPS_PORT
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{endpoint} is not the URL of a store: write it like https://store.example.com:9000")
    return parts.port or (HTTP_PORT if parts.scheme == "http" else HTTPS_PORT)


@dataclass(frozen=True)
class Installation:
    """Made by the settings; the same for every session.

    namespace: of the release, where API server and operator run.
    checkpoint_root: the URL that workers write checkpoints to; `file://…` lies on `checkpoint_claim`.
    checkpoint_environment: variables by which workers reach a remote root, such as AWS_ENDPOINT_URL_S3.
    checkpoint_secret: a Secret beside each worker whose keys are such variables too: the credentials.
    ray_version: in the images of sessions of several pods, as KubeRay is told it; None: that of the project's own.
    ray_cluster_labels: on their RayClusters, by which KubeRay knows what starts all pods together.
    hang_timeout_seconds: how long one operation may run before its worker is taken for hung.
    delete_grace_seconds: how long a deletion waits for the adapters of a session to be saved elsewhere.
    reserved: names of the installation's own, which sessions and pools may not use.
    allowed_images, allowed_secrets: what they may name, as patterns.
    client_labels: pods of the release's namespace with one of these label sets may speak to workers.
    """

    namespace: str
    release: str
    trainer_image: str
    trainer_image_pull_policy: str
    checkpoint_root: str
    checkpoint_claim: str | None
    hang_timeout_seconds: float
    delete_grace_seconds: float = 600
    checkpoint_environment: Mapping[str, str] = field(default_factory=dict)
    checkpoint_secret: str | None = None
    ray_version: str | None = None
    ray_cluster_labels: Mapping[str, str] = field(default_factory=dict)
    reserved: Reserved = Reserved()
    allowed_images: tuple[str, ...] = (ANY,)
    allowed_secrets: tuple[str, ...] = (ANY,)
    client_labels: tuple[Mapping[str, str], ...] = (API_SERVER_LABELS, OPERATOR_LABELS)

    @property
    def policy(self) -> Policy:
        return Policy(self.trainer_image, self.reserved, self.allowed_images, self.allowed_secrets)

    @property
    def checkpoint_port(self) -> int | None:
        """Where a remote checkpoint root is reached; None for a local one."""
        return remote_port(self.checkpoint_environment) if self.checkpoint_root_is_remote else None

    @property
    def checkpoint_identity_is_the_pods(self) -> bool:
        """Whether a remote root is reached by what the node or the ServiceAccount is allowed: no Secret has keys."""
        return self.checkpoint_root_is_remote and self.checkpoint_secret is None

    @property
    def checkpoint_root_is_remote(self) -> bool:
        return urlsplit(self.checkpoint_root).scheme not in {"", "file"}


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
