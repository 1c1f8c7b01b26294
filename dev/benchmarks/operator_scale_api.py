"""Requests to the API server of the cluster in `operator_scale.py`, and its watches."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

Manifest = dict[str, Any]
Query = list[tuple[str, str]]
MERGE_PATCH = "application/merge-patch+json"
ALREADY_THERE = 409
WATCH_SECONDS = 7200

ItemT = TypeVar("ItemT")


class Api:
    """The API server, as an administrator reaches it, with any number of connections."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def call(
        self, method: str, path: str, body: Manifest | None = None, content: str = "application/json"
    ) -> Manifest:
        """Send a request. An object that exists already is no error."""
        request = await self._client.param_serialize(method, path, None, [], {"Content-Type": content}, body)
        response = await self._client.call_api(*request, _request_timeout=120)
        answer: bytes = await response.read()  # type: ignore[no-untyped-call]
        if response.status >= 400 and response.status != ALREADY_THERE:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:300]!r}")
        parsed: Manifest = json.loads(answer)
        return parsed

    async def requests(self) -> float:
        """Return how many requests the API server has answered for all its clients, without watches."""
        request = await self._client.param_serialize("GET", "/metrics", None, [], {}, None)
        response = await self._client.call_api(*request, _request_timeout=120)
        page = (await response.read()).decode()  # type: ignore[no-untyped-call]
        lines = re.findall(r"^apiserver_request_total{(.*)} (\S+)$", page, re.M)
        return sum(float(count) for labels, count in lines if 'verb="WATCH"' not in labels)

    async def watch(self, path: str, query: Query | None = None) -> AsyncIterator[tuple[str, Manifest]]:
        """Yield the present objects as ADDED, then each event. After the end of a watch, begin again."""
        while True:
            async for event in self._watch_once(path, query or []):
                yield event

    async def _watch_once(self, path: str, selects: Query) -> AsyncIterator[tuple[str, Manifest]]:
        request = await self._client.param_serialize("GET", path, None, selects, {}, None)
        response = await self._client.call_api(*request, _request_timeout=120)
        listed = json.loads(await response.read())  # type: ignore[no-untyped-call]
        for item in listed["items"]:
            yield "ADDED", item
        version = listed["metadata"]["resourceVersion"]
        follow = [("watch", "true"), ("resourceVersion", version), ("timeoutSeconds", str(WATCH_SECONDS))]
        request = await self._client.param_serialize("GET", path, None, [*selects, *follow], {}, None)
        response = await self._client.call_api(*request, _request_timeout=WATCH_SECONDS)
        rest = b""
        async for chunk in response.response.content.iter_any():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return
                yield event["type"], event["object"]


@asynccontextmanager
async def connected(kubeconfig: Path) -> AsyncIterator[Api]:
    configuration = Configuration()
    await config.load_kube_config(config_file=str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = 0
    async with ApiClient(configuration) as client:
        yield Api(client)


async def each(items: Iterable[ItemT], act: Callable[[ItemT], Awaitable[object]], at_once: int) -> None:
    """Act on all items, this number at a time."""
    places = asyncio.Semaphore(at_once)

    async def one(item: ItemT) -> None:
        async with places:
            await act(item)

    async with asyncio.TaskGroup() as group:
        for item in items:
            group.create_task(one(item))
