"""The first API key of an installation, in a Secret that the API server's pod reads.

A chart cannot create the key, because each rendering of the chart would contain a new key. The operator creates the
Secret by a POST, which succeeds for only one operator. The Secret is never replaced.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable

from tinsmith_operator.api.names import MANAGED_BY_LABEL, MANAGER
from tinsmith_operator.errors import AlreadyExists, NotFound
from tinsmith_operator.kube.client import Cluster
from tinsmith_operator.kube.resources import SECRETS
from tinsmith_operator.logs import get_logger

KEY_FIELD = "key"

log = get_logger(__name__)


def new_key() -> str:
    """Return a random key with the prefix that the tinker SDK requires."""
    return f"tml-{secrets.token_urlsafe(32)}"


class FirstApiKey:
    """A task that creates the Secret with the first key.

    `secret` is the name of the Secret, or None if the administrator provides a key.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        namespace: str,
        release: str,
        secret: str | None,
        make: Callable[[], str] = new_key,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._release = release
        self._secret = secret
        self._make = make

    @property
    def secret_names(self) -> tuple[str, ...]:
        return (self._secret,) if self._secret is not None else ()

    async def ensure(self) -> None:
        """Create the Secret if the Secret does not exist. Raises ClusterError."""
        if self._secret is None:
            return
        try:
            await self._cluster.get(SECRETS, self._namespace, self._secret)
        except NotFound:
            await self._create(self._secret)

    async def _create(self, name: str) -> None:
        labels = {
            "app.kubernetes.io/name": "tinsmith",
            "app.kubernetes.io/instance": self._release,
            MANAGED_BY_LABEL: MANAGER,
        }
        secret = {
            "apiVersion": SECRETS.api_version,
            "kind": SECRETS.kind,
            "metadata": {"name": name, "namespace": self._namespace, "labels": labels},
            "type": "Opaque",
            "data": {KEY_FIELD: base64.b64encode(self._make().encode()).decode()},
        }
        try:
            await self._cluster.create(SECRETS, secret)
        except AlreadyExists:
            return
        log.info("first API key created", secret=name)
