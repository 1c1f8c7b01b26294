"""Requests to the Kubernetes API. The methods take and return plain dictionaries, and raise the operator's own errors.

All requests wait for the rate limit, except for requests about the Lease. Each write asks for a permit; after the Lease
is lost, permits are refused (`runtime/leader.py`). Two operators that write at the same time do no harm. A create fails
if the object exists. A write to an existing object names the object's UID and, except for a delete, also the version.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from kubernetes.aio.client import ApiClient

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import CONFIGURATION_ANNOTATION, MANAGER, PROGRESS_MANAGER
from tinsmith_operator.errors import (
    AlreadyExists,
    ClusterError,
    Conflict,
    NotFound,
    Refused,
    Throttled,
    Unavailable,
)
from tinsmith_operator.kube.connection import USER_AGENT, Observe, load_configuration, trace
from tinsmith_operator.kube.depth import parse_json
from tinsmith_operator.kube.rate_limit import Priority, RateLimit
from tinsmith_operator.kube.resources import SECRETS, Resource
from tinsmith_operator.kube.server_clock import ServerClock

READ_TIMEOUT_SECONDS = 30.0
PAGE_ITEMS = 100
"""The number of objects in a page of a list. A page is about 1 MB, and takes ten times as much memory when parsed."""


JSON_PATCH = "application/json-patch+json"
MERGE_PATCH = "application/merge-patch+json"
# Without a charset, the client would encode the body itself, as ASCII JSON.
APPLY_PATCH = "application/apply-patch+yaml; charset=utf-8"
JSON = "application/json"

# Status 500 with these messages needs a person. One is an apply of a field that the kind does not have
# (kubernetes/kubernetes#122480). The other is an admission webhook that does not answer.
FOR_A_PERSON = ("failed to create typed patch object", "failed calling webhook")

Query = dict[str, str | None]

Permit = Callable[[], float]
"""A function that returns how many seconds a write may take from now on. Raises NotLeading."""


class Cluster:
    """A rate-limited client of the API server. Each write of the client needs a permit."""

    def __init__(self, limit: RateLimit, permit: Permit, observe: Observe, clock: ServerClock | None = None) -> None:
        self._clock = clock or ServerClock()
        self._limit = limit
        self._permit = permit
        self._observe = observe
        self._client: ApiClient | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]
            self._client = None

    async def get(self, resource: Resource, namespace: str, name: str) -> Manifest:
        """Return the object. Raises NotFound."""
        return await self._read(resource.path(namespace, name))

    async def read_lease(self, resource: Resource, namespace: str, name: str) -> Manifest:
        """Return the Lease without waiting for the rate limit. Without the wait, even a busy leader keeps the Lease.

        Raises NotFound.
        """
        return await self._send("GET", resource.path(namespace, name))

    async def list_all(
        self, resource: Resource, namespace: str | None, field_selector: str | None = None
    ) -> tuple[list[Manifest], int]:
        """Return the objects of the kind that the operator watches, and the version of the list.

        `namespace` None stands for all namespaces.
        """
        query: Query = {"labelSelector": resource.label_selector, "fieldSelector": field_selector}
        found: list[Manifest] = []
        after: str | None = None
        while True:
            page = {**query, "limit": str(PAGE_ITEMS), "continue": after}
            answer = await self._read(resource.path(namespace), page)
            items, version = read_list(resource, answer)
            found += items
            after = next_page(answer)
            if after is None:
                return found, version

    async def try_list(self, resource: Resource, namespace: str | None) -> None:
        """Check whether objects of the kind can be listed.

        Raises NotFound for a kind that does not exist, and Refused.
        """
        await self._read(resource.path(namespace), {"limit": "1"})

    async def kinds_of(self, api_version: str) -> frozenset[str]:
        """Return the plurals of the kinds in the API server's discovery document for this API version."""
        groups = (await self._read("/apis"))["groups"]
        versions = {str(version["groupVersion"]) for group in groups for version in group["versions"]}
        if api_version not in versions:
            return frozenset()
        answer = await self._read(f"/apis/{api_version}")
        return frozenset(str(kind["name"]) for kind in answer["resources"])

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Create the object.

        Raises AlreadyExists. Raises Refused for an unknown field. In its default mode, the API server would drop an
        unknown field.
        """
        path = resource.path(manifest["metadata"]["namespace"])
        query: Query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return await self._write("POST", path, manifest, query=query, priority=_priority_of(resource))

    async def apply(self, resource: Resource, manifest: Manifest, subresource: str | None = None) -> Manifest:
        """Apply the manifest to this version of the object, with force. The metadata must have a UID and a version.

        Raises Conflict if the object has changed or is gone.
        """
        priority = Priority.STATUS if subresource == "status" else _priority_of(resource)
        return await self._apply(resource, manifest, subresource, MANAGER, priority)

    async def apply_progress(self, resource: Resource, manifest: Manifest) -> Manifest:
        """Apply the training progress in the status to this version of the object, after all waiting requests.

        The progress has a field manager of its own, so that neither apply of the status removes fields of the other.
        """
        return await self._apply(resource, manifest, "status", PROGRESS_MANAGER, Priority.PROGRESS)

    async def _apply(
        self, resource: Resource, manifest: Manifest, subresource: str | None, manager: str, priority: Priority
    ) -> Manifest:
        metadata = manifest["metadata"]
        if not (metadata.get("uid") and metadata.get("resourceVersion")):
            raise AssertionError("an apply without UID and version could overwrite a foreign object")
        path = resource.path(metadata["namespace"], metadata["name"], subresource)
        query: Query = {"fieldManager": manager, "force": "true"}
        patch = apply_patch(manifest)
        return await self._write("PATCH", path, patch, query=query, content=APPLY_PATCH, priority=priority)

    async def own_created_fields(self, resource: Resource, manifest: Manifest, managed: list[Manifest]) -> Manifest:
        """Replace the managed fields of this version of the object, and remove the object's configuration annotation.

        Raises Conflict.

        If the next apply fails, the missing annotation shows that the object differs from the desired object.
        """
        metadata = manifest["metadata"]
        patch = [
            {"op": "replace", "path": "/metadata/resourceVersion", "value": metadata["resourceVersion"]},
            {"op": "replace", "path": "/metadata/managedFields", "value": managed},
        ]
        if CONFIGURATION_ANNOTATION in (metadata.get("annotations") or {}):
            escaped = CONFIGURATION_ANNOTATION.replace("~", "~0").replace("/", "~1")
            patch.append({"op": "remove", "path": f"/metadata/annotations/{escaped}"})
        path = resource.path(metadata["namespace"], metadata["name"])
        return await self._write("PATCH", path, patch, content=JSON_PATCH, priority=_priority_of(resource))

    async def merge(self, resource: Resource, manifest: Manifest, changes: Manifest) -> Manifest:
        """Set fields of this version of the object.

        A field with the new value None is removed. Raises Conflict and NotFound.
        """
        metadata = manifest["metadata"]
        guard = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}
        path = resource.path(metadata["namespace"], metadata["name"])
        patch = {**changes, "metadata": {**changes.get("metadata", {}), **guard}}
        query: Query = {"fieldManager": MANAGER}
        priority = _priority_of(resource)
        return await self._write("PATCH", path, patch, query=query, content=MERGE_PATCH, priority=priority)

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str,
        grace_period_seconds: int | None = None,
        resource_version: str | None = None,
    ) -> Manifest:
        """Delete the object with this UID. If a version is given, delete only this version.

        Raises NotFound and Conflict.
        """
        version = {"resourceVersion": resource_version} if resource_version is not None else {}
        options = {"preconditions": {"uid": uid, **version}, "propagationPolicy": "Background"}
        if grace_period_seconds is not None:
            options["gracePeriodSeconds"] = grace_period_seconds  # type: ignore[assignment]
        path = resource.path(namespace, name)
        return await self._write("DELETE", path, options, priority=Priority.DELETE)

    async def write_lease(self, resource: Resource, manifest: Manifest, timeout_seconds: float) -> Manifest:
        """Create the Lease, or replace the Lease if `manifest` contains a version.

        A write of the Lease needs no permit, because the Lease itself is the permit.
        """
        metadata = manifest["metadata"]
        replaces = "resourceVersion" in metadata
        path = resource.path(metadata["namespace"], metadata["name"] if replaces else None)
        return await self._send("PUT" if replaces else "POST", path, manifest, timeout_seconds=timeout_seconds)

    async def _read(self, path: str, query: Query | None = None) -> Manifest:
        await self._limit.wait(Priority.ESSENTIAL)
        return await self._throttled(self._send("GET", path, query=query))

    async def _throttled(self, request: Awaitable[Manifest]) -> Manifest:
        """Await the request. If the API server asks for a pause, delay all requests."""
        try:
            return await request
        except Throttled as error:
            self._limit.hold(error.retry_after_seconds or 1.0)
            raise

    async def _write(
        self,
        method: str,
        path: str,
        body: Any,
        *,
        query: Query | None = None,
        content: str = JSON,
        priority: Priority = Priority.ORDINARY,
    ) -> Manifest:
        await self._limit.wait(priority)
        timeout_seconds = self._permit()
        request = self._send(method, path, body, query=query, content=content, timeout_seconds=timeout_seconds)
        return await self._throttled(request)

    async def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Query | None = None,
        content: str = JSON,
        timeout_seconds: float = READ_TIMEOUT_SECONDS,
    ) -> Manifest:
        client = await self._connected()
        pairs = [(key, value) for key, value in (query or {}).items() if value is not None]
        headers = {"Content-Type": content, "Accept": JSON}
        sent_at = self._clock.local()
        try:
            async with asyncio.timeout(timeout_seconds):
                request = await client.param_serialize(
                    method, path, None, pairs, headers, body, auth_settings=["BearerToken"]
                )
                response = await client.call_api(*request)
                answer = await response.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
            # This RuntimeError means that another request was just answered with 401, and closed the shared session.
            raise Unavailable(f"The Kubernetes API did not answer {method} {path}: {error!r}.") from error
        self._clock.note(response.headers.get("Date"), sent_at)
        if response.status == 401:
            # The login has expired, so the next request reads the credentials again.
            await self.close()
        if response.status >= 400:
            raise error_of(response.status, answer, response.headers.get("Retry-After"), f"{method} {path}")
        try:
            parsed: Manifest = parse_json(answer)
        except ValueError as error:
            raise Unavailable(f"Something other than the Kubernetes API answered {method} {path}.") from error
        return parsed

    async def _connected(self) -> ApiClient:
        if self._client is None:
            configuration = await load_configuration()
            configuration.trace_configs = [trace(self._observe)]
            client = ApiClient(configuration)
            client.user_agent = USER_AGENT
            self._client = client
        return self._client


def _priority_of(resource: Resource) -> Priority:
    """Return the priority of a write that is neither a status update nor a delete.

    Writes of Secrets have priority, because Secrets hold certificates.
    """
    return Priority.ESSENTIAL if resource == SECRETS else Priority.ORDINARY


def read_list(resource: Resource, answer: Manifest) -> tuple[list[Manifest], int]:
    """Return the objects and the version of a list.

    The API server omits the kind of each object, so this function adds the kind.
    """
    named = [{"apiVersion": resource.api_version, "kind": resource.kind, **item} for item in answer["items"]]
    return named, int(answer["metadata"]["resourceVersion"])


def next_page(answer: Manifest) -> str | None:
    """Return the token of the next page, or None after the last page."""
    return answer["metadata"].get("continue") or None


def error_of(status: int, body: bytes, retry_after: str | None, what: str) -> ClusterError:
    """Return the operator's error for an error answer of the API server."""
    try:
        answer = parse_json(body)
        reason, message = answer.get("reason"), answer.get("message") or ""
    except (ValueError, AttributeError):
        reason, message = None, body[:200].decode(errors="replace")
    text = f"The Kubernetes API answered {what} with {status}: {message}"
    seconds = float(retry_after) if retry_after and retry_after.isdigit() else None
    if status == 429:
        return Throttled(text, seconds or 1.0)
    if status == 409:
        return AlreadyExists(text) if reason == "AlreadyExists" else Conflict(text)
    if status == 500 and any(words in message for words in FOR_A_PERSON):
        return Refused(message)
    if status in (401, 410) or status >= 500:
        return Unavailable(text, seconds)
    return NotFound(text) if status == 404 else Refused(message or text)


# YAML refuses DEL and the C1 controls, folds NEL, LS and PS, and drops a byte order mark. Every character of the Basic
# Multilingual Plane has a six-character escape that means the same in JSON and YAML.
_ESCAPED = re.compile("[\x7f-\uffff]")


def apply_patch(manifest: Manifest) -> str:
    r"""Return the manifest as JSON text that a YAML parser reads in the same way.

    The API server parses a server-side apply as YAML.

    ASCII JSON writes a character above U+FFFF as a pair of surrogate escapes, `\ud83d\ude00`. The API server's YAML
    parser refuses a patch that contains such a pair. So characters above U+FFFF are sent without escapes. A lone
    surrogate is replaced by U+FFFD, as in the API server's JSON parser.
    """
    text = json.dumps(manifest, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", well_formed(text))


def well_formed(text: str) -> str:
    """Return the text with every lone surrogate replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shortened(text: str, most_bytes: int) -> str:
    """Return the text, shortened to at most `most_bytes` bytes of UTF-8.

    The API server limits the fields of Events in bytes.
    """
    encoded = well_formed(text).encode()
    if len(encoded) <= most_bytes:
        return encoded.decode()
    ellipsis = "…"
    return encoded[: most_bytes - len(ellipsis.encode())].decode(errors="ignore") + ellipsis
