"""The only module that calls the Kubernetes API.

This module takes and returns plain dictionaries, and raises the server's errors.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import orjson
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException

from tinsmith_server.errors import StartupError, TinsmithError


class KubernetesError(TinsmithError):
    """An error from the Kubernetes API."""


class ApiUnavailable(KubernetesError):
    """The API does not answer now. A retry may succeed."""


class ApiRefused(KubernetesError):
    """The API refused the request as forbidden, unknown, invalid or over quota."""


class AlreadyThere(KubernetesError):
    """An object with this name already exists."""


class HistoryGone(KubernetesError):
    """The version from which a watch should continue has expired."""


Manifest: TypeAlias = dict[str, Any]

GROUP_VERSION = "tinsmith.dev/v1alpha1"
KIND = "TrainingSession"
FIELD_MANAGER = "tinsmith-api-server"

REQUEST_SECONDS = 30.0
# The API server ends a watch after this time. The grace period detects a proxy that drops the watch silently.
WATCH_SECONDS = 60
WATCH_GRACE_SECONDS = 15.0
# Of a claim, only the UID is needed.
MERGE_PATCH = "application/merge-patch+json"
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
# Kubernetes' own objects and their managed fields are nested less than 30 levels deep.
DEEPEST = 100
# An unterminated string matches up to the end of the text. The pattern never backtracks, so the time is linear for any
# text.
_STRINGS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[{}\[\]]', re.DOTALL)
_EMPTY = {b"{": b"{}", b"[": b"[]"}
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object that this server reads. Only objects with the label `label` are read."""

    group_version: str
    plural: str
    kind: str
    label: str | None = None

    def path(self, namespace: str | None) -> str:
        """Return the URL path of the objects in one namespace, or in all namespaces."""
        inside = f"namespaces/{namespace}/" if namespace is not None else ""
        return f"/apis/{self.group_version}/{inside}{self.plural}"

    @property
    def query(self) -> dict[str, str]:
        return {"labelSelector": self.label} if self.label is not None else {}


SESSIONS = Resource(GROUP_VERSION, "trainingsessions", KIND)
TEMPLATES = Resource(GROUP_VERSION, "sessiontemplates", "SessionTemplate")
POOLS = Resource(GROUP_VERSION, "samplerpools", "SamplerPool")
# EndpointSlices have the labels of the pool's Service.
ENDPOINTS = Resource("discovery.k8s.io/v1", "endpointslices", "EndpointSlice", label="tinsmith.dev/pool")


class KubernetesApi:
    """The calls that the API server's service account may make.

    A namespace of None means all namespaces. Methods raise KubernetesError.
    """

    def __init__(self) -> None:
        self.cluster = ""
        """A digest that identifies the cluster. The digest is empty before the first request."""
        self._client: ApiClient | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        """Close the client. Later calls raise ApiUnavailable."""
        self._closed = True
        async with self._connecting:
            await self._disconnect()

    async def list(self, resource: Resource, namespace: str | None) -> tuple[list[Manifest], str]:
        """Return all objects, and the version from which a watch can continue."""
        answer = await self._send("GET", resource.path(namespace), query=resource.query)
        return answer["items"], answer["metadata"]["resourceVersion"]

    async def watch(
        self, resource: Resource, namespace: str | None, version: str
    ) -> AsyncGenerator[tuple[str, Manifest], None]:
        """Yield events after the version, as (type, object), until the server ends the watch.

        Raises HistoryGone if the version is too old; the caller must then list again.
        """
        query = {
            **resource.query,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        path = resource.path(namespace)
        try:
            timeout_seconds = WATCH_SECONDS + WATCH_GRACE_SECONDS
            async with await self._open("GET", path, timeout_seconds, query=query) as response:
                async for line in response.content:
                    yield _parse_event(parse_json(line))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiUnavailable(f"a watch of the Kubernetes API ended: {error!r}") from error

    async def create_session(self, manifest: Manifest) -> Manifest:
        """Create a TrainingSession. Raises AlreadyThere if the name is already in use."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        path = SESSIONS.path(manifest["metadata"]["namespace"])
        return await self._send("POST", path, query=query, body=manifest)

    async def want(self, resource: Resource, namespace: str, name: str, at: datetime) -> None:
        """Write into the status that a client wants a session or pool that is suspended because it was idle."""
        patch = {"status": {"wantedTime": at.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}
        path = f"{resource.path(namespace)}/{name}/status"
        await self._send("PATCH", path, query={"fieldManager": FIELD_MANAGER}, body=patch, content=MERGE_PATCH)

    async def claim_uids(self, namespace: str) -> set[str]:
        """Return the UID of every PersistentVolumeClaim."""
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims"
        answer = await self._send("GET", path, accept=METADATA_ONLY)
        # In an empty list of metadata, `items` is null.
        return {item["metadata"]["uid"] for item in answer["items"] or ()}

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
        accept: str = "application/json",
        content: str = "application/json",
    ) -> Manifest:
        try:
            opened = self._open(method, path, REQUEST_SECONDS, query=query, body=body, accept=accept, content=content)
            async with await opened as response:
                answer: Manifest = parse_json(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiUnavailable(f"the Kubernetes API did not answer {method} {path}: {error!r}") from error
        return answer

    async def _open(
        self,
        method: str,
        path: str,
        timeout_seconds: float,
        *,
        query: dict[str, str] | None = None,
        body: Manifest | None = None,
        accept: str = "application/json",
        content: str = "application/json",
    ) -> aiohttp.ClientResponse:
        """Return the response of a successful request. The caller must read the response within the remaining time."""
        client = await self._connected()
        headers = {"Accept": accept, "Content-Type": content}
        request = await client.param_serialize(
            method, path, None, list((query or {}).items()), headers, body, auth_settings=["BearerToken"]
        )
        answer = await client.call_api(*request, _request_timeout=timeout_seconds)
        response: aiohttp.ClientResponse = answer.response
        if response.status >= 400:
            refusal = await response.read()
            if response.status == 401:
                # The credentials have expired. The next request reads them again.
                await self._disconnect()
            raise error_of(response.status, refusal, f"{method} {path}")
        return response

    async def _connected(self) -> ApiClient:
        # Several watches begin at once. Without the lock a second client, or a client created after `close`, would
        # never be closed.
        async with self._connecting:
            if self._closed:
                raise ApiUnavailable("this server is stopping")
            if self._client is None:
                configuration = await _configuration()
                self.cluster = cluster_of(configuration)
                self._client = ApiClient(configuration)
                self._client.user_agent = FIELD_MANAGER
            return self._client

    async def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()  # type: ignore[no-untyped-call]


def parse_json(text: bytes) -> Any:
    """Return the value of a JSON text. Leave out values that are nested deeper than in any Kubernetes object.

    Raises ValueError.

    A user who may write an object can nest its managed fields 10,000 levels deep, and every parser fails at this depth.
    One deeply nested object must not break every list of objects of the same kind.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return orjson.loads(_flattened(text))


def _flattened(text: bytes) -> bytes:
    """Remove the contents of all objects and lists at the depth limit, and return the JSON text."""
    kept, depth, begins = bytearray(), 0, 0
    for token in _STRINGS_AND_BRACKETS.finditer(text):
        bracket = token[0]
        if bracket in _EMPTY:
            depth += 1
            if depth == DEEPEST:
                kept += text[begins : token.start()] + _EMPTY[bracket]
        elif not bracket.startswith(b'"'):
            if depth == DEEPEST:
                begins = token.end()
            depth -= 1
    return bytes(kept + text[begins:])


def cluster_of(configuration: Configuration) -> str:
    """Return a digest of the cluster's certificate authority.

    Two clusters may have the same address and the same names.
    """
    authority = configuration.ssl_ca_cert
    named = Path(authority).read_bytes() if authority else str(configuration.host).encode()
    return hashlib.sha256(named).hexdigest()[:12]


def own_namespace() -> str | None:
    """Return the namespace of this server's pod, or None outside a pod."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return None


def error_of(status: int, content: bytes, what: str) -> KubernetesError:
    """Return the server's error for a refusal by the API."""
    try:
        answer = parse_json(content)
        reason, message = answer.get("reason"), answer.get("message") or ""
    except (ValueError, AttributeError):
        reason, message = None, content[:200].decode(errors="replace")
    if status == 410:
        return HistoryGone(message)
    if reason == "AlreadyExists":
        return AlreadyThere(message)
    if status in (401, 409, 429) or status >= 500:
        return ApiUnavailable(f"the Kubernetes API answered {what} with {status}: {message}")
    return ApiRefused(message or f"the Kubernetes API answered {what} with {status}")


def _parse_event(event: Manifest) -> tuple[str, Manifest]:
    if event["type"] == "ERROR":
        status = event["object"]
        raise error_of(int(status.get("code") or 500), orjson.dumps(status), "a watch")
    return event["type"], event["object"]


async def _configuration() -> Configuration:
    """Return the configuration from $KUBECONFIG, or from the pod's service account.

    The account's token is read every minute.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = 0  # no limit, because each watch holds a connection
    try:
        if file := os.environ.get("KUBECONFIG"):
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=file, client_configuration=configuration
            )
        else:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError) as error:
        raise StartupError(
            f"no credentials for the Kubernetes API: {error}; run the server in a pod with a service account, or set "
            "KUBECONFIG"
        ) from error
    return configuration
