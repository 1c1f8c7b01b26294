"""The facts about the installation for builders and decisions, and the namespaces that the operator watches."""

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
"""The environment variables for the URL of an object store that is not Amazon S3.

If several variables are set, the first variable in the list counts, as in botocore.
"""

HTTP_PORT = 80
HTTPS_PORT = 443


def remote_port(environment: Mapping[str, str]) -> int:
    """Return the port of the object store that these variables name. Raises ValueError for an invalid URL."""
    endpoint = next((environment[name] for name in ENDPOINT_VARIABLES if environment.get(name)), None)
    if endpoint is None:
        return HTTPS_PORT
    return endpoint_port(endpoint, "an object store", "https://store.example.com:9000")


def endpoint_port(endpoint: str, what: str, example: str) -> int:
    """Return the port of a URL. Raises ValueError with `what` the URL must name, and an example."""
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{endpoint} is not the URL of {what}: use one such as {example}")
    return parts.port or (HTTP_PORT if parts.scheme == "http" else HTTPS_PORT)


def collector_port(endpoint: str) -> int:
    """Return the port of a collector of traces. Raises ValueError for an invalid URL."""
    return endpoint_port(endpoint, "an OTLP collector", "http://collector.monitoring:4318")


@dataclass(frozen=True)
class Installation:
    """The settings that all sessions and pools of an installation share.

    - `namespace`: the release's namespace, where the API server and the operator run.
    - `checkpoint_root`: the URL to which workers write checkpoints; `file://…` is a path on the volume of
      `checkpoint_claim`.
    - `checkpoint_environment`: the workers' variables for a remote root, such as AWS_ENDPOINT_URL_S3.
    - `checkpoint_secret`: a Secret in each worker's namespace, whose keys are variables with the credentials for the
      root.
    - `tracing_endpoint`: the URL of an OTLP collector for traces of workers; None: no traces.
    - `ray_version`: the Ray version in the images of sessions with several nodes; None: the version in the project's
      own images.
    - `ray_cluster_labels`: labels on the RayClusters, so that all pods of a RayCluster start together.
    - `hang_timeout_seconds`: a worker counts as hung if one operation takes longer than this number of seconds.
    - `delete_grace_seconds`: how long a deletion waits until the adapters are saved to the checkpoint root.
    - `reserved`: names of the installation's own objects, which sessions and pools may not use.
    - `allowed_images`, `allowed_secrets`: patterns of the names that sessions and pools may use.
    - `client_labels`: pods in the release's namespace with one of these label sets may call workers.
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
    tracing_endpoint: str | None = None
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
        """The port of a remote checkpoint root, or None if the root is local."""
        return remote_port(self.checkpoint_environment) if self.checkpoint_root_is_remote else None

    @property
    def tracing_port(self) -> int | None:
        """The port of the collector, or None without traces."""
        return None if self.tracing_endpoint is None else collector_port(self.tracing_endpoint)

    @property
    def checkpoint_identity_is_the_pods(self) -> bool:
        """True if pods access a remote root without a Secret, with the identity of the node or ServiceAccount."""
        return self.checkpoint_root_is_remote and self.checkpoint_secret is None

    @property
    def checkpoint_root_is_remote(self) -> bool:
        return urlsplit(self.checkpoint_root).scheme not in {"", "file"}


CLUSTER = "*"
# Kubernetes checks names of namespaces by RFC 1123.
NAMESPACE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Scope:
    """The namespaces that an operator watches. None means the whole cluster, which requires cluster-wide rights."""

    namespaces: tuple[str, ...] | None

    @property
    def is_cluster(self) -> bool:
        return self.namespaces is None

    @property
    def parts(self) -> tuple[str | None, ...]:
        """The namespaces that are listed and watched separately. None means all namespaces together."""
        return (None,) if self.namespaces is None else self.namespaces

    def part_of(self, namespace: str) -> str | None:
        """Return the part of the scope that contains a namespace."""
        return None if self.is_cluster else namespace


def parse_scope(text: str, own: str) -> Scope:
    """Read a scope. `*` is the cluster, `a,b` is two namespaces, and an empty text is the namespace of the release.

    Raises ValueError.
    """
    if text.strip() == CLUSTER:
        return Scope(None)
    names = [name.strip() for name in text.split(",") if name.strip()] or [own]
    for name in names:
        if not NAMESPACE_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not the name of a namespace: separate names by commas, or use `*` alone for the whole "
                "cluster, or an empty text for the release's own namespace"
            )
    return Scope(tuple(dict.fromkeys(names)))
