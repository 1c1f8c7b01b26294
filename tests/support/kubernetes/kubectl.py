"""The actions of a person in a cluster without nodes: kubectl in one namespace, and the kubelet's part."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration
from tinsmith_operator.api.base import format_time
from tinsmith_operator.kube.resources import PODS, WATCHED, Resource

Manifest = dict[str, Any]
MERGE_PATCH = "application/merge-patch+json"
TIMEOUT_SECONDS = 100.0


class KubectlError(Exception):
    """The API server's refusal; `status` is its number."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body.decode(errors='replace')[:500]}")
        self.status = status


class KubectlUser:
    """One namespace, as an administrator reaches it."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    async def get(self, resource: Resource, name: str) -> Manifest | None:
        try:
            return await self._send("GET", resource.path(self.namespace, name))
        except KubectlError as error:
            if error.status != 404:
                raise
            return None

    async def all(self, resource: Resource) -> list[Manifest]:
        answer = await self._send("GET", resource.path(self.namespace))
        return [{"apiVersion": resource.api_version, "kind": resource.kind, **item} for item in answer["items"]]

    async def create(self, resource: Resource, manifest: Manifest) -> Manifest:
        return await self._send("POST", resource.path(self.namespace), manifest)

    async def post_to(self, resource: Resource, name: str, subresource: str, manifest: Manifest) -> Manifest:
        return await self._send("POST", resource.path(self.namespace, name, subresource), manifest)

    async def patch(
        self, resource: Resource, name: str, patch: Any, subresource: str | None = None, manager: str | None = None
    ) -> Manifest:
        """Apply a merge patch under the name of that field manager."""
        path = resource.path(self.namespace, name, subresource)
        return await self._send("PATCH", path, patch, MERGE_PATCH, manager)

    async def delete(self, resource: Resource, name: str, **options: Any) -> None:
        await self._send("DELETE", resource.path(self.namespace, name), options or None)

    async def raw(self, path: str) -> str:
        return (await self._call("GET", path, None, "application/json")).decode()

    async def _send(
        self, method: str, path: str, body: Any = None, content: str = "application/json", manager: str | None = None
    ) -> Manifest:
        answer: Manifest = json.loads(await self._call(method, path, body, content, manager))
        return answer

    async def _call(self, method: str, path: str, body: Any, content: str, manager: str | None = None) -> bytes:
        headers, query = {"Content-Type": content}, [("fieldManager", manager)] if manager is not None else []
        request = await self._client.param_serialize(method, path, None, query, headers, body)
        response = await self._client.call_api(*request, _request_timeout=TIMEOUT_SECONDS)
        answer: bytes = await response.read()  # type: ignore[no-untyped-call]
        if response.status >= 400:
            raise KubectlError(response.status, answer)
        return answer


@asynccontextmanager
async def hands_on(kubeconfig: Path, namespace: str) -> AsyncIterator[KubectlUser]:
    configuration = Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    async with ApiClient(configuration) as client:
        yield KubectlUser(client, namespace)


class Kubelet:
    """Makes every pod of a namespace ready as soon as it is there, or lets it succeed where it is a Job's.

    Pods without a node go at once when deleted.
    """

    def __init__(self, hands: KubectlUser) -> None:
        self._hands = hands
        self._seen: set[str] = set()
        self.idle = False

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            # An API server that is slow for a while is asked again: a kubelet that ends leaves every test waiting.
            with contextlib.suppress(TimeoutError, KubectlError, aiohttp.ClientError):
                await self._look()
            await asyncio.sleep(0.1)

    async def _look(self) -> None:
        for pod in await self._hands.all(PODS):
            uid = pod["metadata"]["uid"]
            if uid not in self._seen and not self.idle:
                with contextlib.suppress(KubectlError):
                    await (self.end(pod) if is_of_a_job(pod) else self.make_ready(pod))
                    self._seen.add(uid)

    async def make_ready(self, pod: Manifest, **container: Any) -> None:
        await self._hands.patch(PODS, pod["metadata"]["name"], {"status": ready_status(pod, **container)}, "status")

    async def end(self, pod: Manifest, exit_code: int = 0, message: str = "") -> None:
        """End a pod that is not started again."""
        ended = {"exitCode": exit_code, "message": message, "finishedAt": format_time(datetime.now(UTC))}
        status = ready_status(pod, ready=False, started=False, state={"terminated": ended})
        status |= {"phase": "Failed" if exit_code else "Succeeded", "conditions": []}
        await self._hands.patch(PODS, pod["metadata"]["name"], {"status": status}, "status")


def is_of_a_job(pod: Manifest) -> bool:
    return any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", ()))


def ready_status(pod: Manifest, **container: Any) -> Manifest:
    """Return the status of a pod that runs well. `container` overrides fields of its container's status."""
    now = format_time(datetime.now(UTC))
    [worker] = pod["spec"]["containers"]
    status = {
        "name": worker["name"],
        "ready": True,
        "started": True,
        "restartCount": 0,
        "image": worker["image"],
        "imageID": image_id(worker["image"]),
        "state": {"running": {"startedAt": now}},
        **container,
    }
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")]
    return {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": conditions,
        "containerStatuses": [status],
        "startTime": now,
    }


def image_id(image: str) -> str:
    """Return the image ID that a node reports for this image."""
    repository = image.partition("@")[0].rpartition(":")[0] or image
    if "@" in image:
        return image
    return f"{repository}@sha256:{hashlib.sha256(image.encode()).hexdigest()}"


async def whole_namespace(hands: KubectlUser) -> list[Manifest]:
    """Every object of the kinds that the operator watches."""
    return [manifest for resource in WATCHED for manifest in await hands.all(resource)]
