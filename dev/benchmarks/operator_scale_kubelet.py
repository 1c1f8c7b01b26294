"""A stand-in for all kubelets: it makes each pod ready as soon as the pod exists.

`operator_scale.py` runs this program with the kubeconfig as its argument.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

from operator_scale_api import MERGE_PATCH, Api, Manifest, connected
from support.kubernetes.kubectl import image_id
from tinsmith_operator.api.base import format_time

AT_ONCE = 24
CONDITIONS = ("PodScheduled", "Initialized", "ContainersReady", "Ready")


def ready_status(pod: Manifest) -> Manifest:
    """Return the status of a running pod. Each pod has an address of its own."""
    now = format_time(datetime.now(UTC))
    address = int(pod["metadata"]["uid"][:6], 16)
    ip = f"10.{address >> 16 & 255}.{address >> 8 & 255}.{address & 255}"
    containers = [
        {
            "name": container["name"],
            "ready": True,
            "started": True,
            "restartCount": 0,
            "image": container["image"],
            "imageID": image_id(container["image"]),
            "state": {"running": {"startedAt": now}},
        }
        for container in pod["spec"]["containers"]
    ]
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "hostIP": "10.0.0.1",
        "startTime": now,
        "conditions": [{"type": type_, "status": "True", "lastTransitionTime": now} for type_ in CONDITIONS],
        "containerStatuses": containers,
    }


async def make_ready(api: Api, waiting: asyncio.Queue[Manifest]) -> None:
    while True:
        pod = await waiting.get()
        place = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}/status"
        await api.call("PATCH", place, {"status": ready_status(pod)}, MERGE_PATCH)


async def main() -> None:
    waiting: asyncio.Queue[Manifest] = asyncio.Queue()
    async with connected(Path(sys.argv[1])) as api, asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(make_ready(api, waiting))
        seen: set[str] = set()
        async for event, pod in api.watch("/api/v1/pods"):
            if event == "ADDED" and pod["metadata"]["uid"] not in seen:
                seen.add(pod["metadata"]["uid"])
                waiting.put_nowait(pod)


if __name__ == "__main__":
    asyncio.run(main())
