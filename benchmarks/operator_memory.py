"""What a whole operator's memory comes to: the program itself, and an API server of this script's that only lists.

Objects are as an API server answers them, with managed fields, defaults and statuses; beside a session's own there are
pods like those of pools, and claims of strangers. Every write but those of the Lease is refused, so that the operator
reads, holds and decides about all of it, and the cluster stays as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import web
from support.kubernetes.api_proxy import write_kubeconfig
from support.operator.operators import OperatorProgram, operator_program, settings_for
from support.operator.resources import session_manifest
from support.operator.session_world import World
from testcluster.ports import free_port
from tinsmith_operator.api.names import MANAGED_BY_LABEL, MANAGER, POOL_LABEL
from tinsmith_operator.ca.certificates import Use, new_authority
from tinsmith_operator.kube.resources import CLAIMS, EVENTS, LEASES, PODS, WATCHED

NAMESPACE = "research"
KIB_OF_A_MIB = 1024
LIMIT_MIB = 512
"""Of the chart's operator."""
VARIABLES = [{"name": f"VARIABLE_{number}", "value": "x" * 60} for number in range(20)]
KINDS = {resource.kind: resource for resource in (*WATCHED, EVENTS, LEASES)}


def fields_of(content: Any) -> Any:
    """As managed fields book it."""
    if not isinstance(content, dict):
        return {}
    return {f"f:{name}": fields_of(value) for name, value in content.items()}


def as_stored(manifest: dict[str, Any], number: int) -> dict[str, Any]:
    said = {"f:metadata": {"f:labels": fields_of(manifest["metadata"].get("labels", {}))}}
    said |= {f"f:{part}": fields_of(manifest[part]) for part in ("spec", "data") if part in manifest}
    managed = {"manager": MANAGER, "operation": "Apply", "fieldsType": "FieldsV1", "fieldsV1": said}
    own = {"resourceVersion": str(number), "managedFields": [managed]}
    return {**manifest, "metadata": {"uid": f"its-{number}", **manifest["metadata"], **own}}


def family() -> list[dict[str, Any]]:
    """A session at rest with everything that belongs to it."""
    world = World(session_manifest())
    world.settle()
    world.worker_reports()
    world.settle()
    assert world.session is not None
    leaf = new_authority("tinsmith", datetime.now(UTC)).issue(("worker",), Use.SERVER, datetime.now(UTC))
    for (kind, _), live in world.objects.items():
        if kind == "Secret":
            live["data"] = leaf.secret_data()
    return [world.session, *world.objects.values()]


def sampler(number: int) -> dict[str, Any]:
    labels = {
        MANAGED_BY_LABEL: MANAGER,
        POOL_LABEL: f"pool-{number % 50}",
        "app.kubernetes.io/name": "tinsmith-sampler",
    }
    arguments = [f"--option-{each}=value" for each in range(15)]
    container = {
        "name": "worker",
        "image": "tinsmith.local/tinsmith/trainer:0.1.0",
        "args": arguments,
        "env": VARIABLES,
    }
    volumes = [{"name": f"v{each}", "emptyDir": {"sizeLimit": "1Gi"}} for each in range(5)]
    conditions = [
        {"type": f"Type{each}", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"} for each in range(5)
    ]
    status = {"phase": "Running", "conditions": conditions, "containerStatuses": [{"name": "worker", "ready": True}]}
    metadata = {"name": f"sampler-{number}", "namespace": NAMESPACE, "labels": labels}
    spec = {"containers": [container], "volumes": volumes, "nodeName": f"node-{number % 100}"}
    return {"kind": PODS.kind, "metadata": metadata, "spec": spec, "status": status}


def claim(number: int) -> dict[str, Any]:
    metadata = {"name": f"theirs-{number}", "namespace": NAMESPACE, "annotations": {"example.com/note": "x" * 2000}}
    size = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"kind": CLAIMS.kind, "metadata": metadata, "spec": size, "status": {"phase": "Bound"}}


def everything(said: argparse.Namespace) -> Iterator[dict[str, Any]]:
    text = json.dumps(family())
    for number in range(said.sessions):
        renamed = text.replace("qwen", f"qwen-{number}").replace("uid-", f"uid-{number}-")
        yield from json.loads(renamed.replace("session-uid", f"session-uid-{number}"))
    yield from map(sampler, range(said.pods - said.sessions))
    yield from map(claim, range(said.strangers))


class Lister:
    """The API server. objects: as text, by kind."""

    def __init__(self, said: argparse.Namespace) -> None:
        self.objects: dict[str, list[str]] = {}
        self.lease: dict[str, Any] | None = None
        for number, manifest in enumerate(everything(said), start=1):
            self.objects.setdefault(manifest["kind"], []).append(json.dumps(as_stored(manifest, number)))
        self.by_plural = {resource.plural: resource for resource in KINDS.values()}

    async def take(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if not rest:
            return web.json_response(self.discovery("/".join(parts[1:]), parts))
        rest = rest[2:] if rest[0] == "namespaces" else rest
        if rest[0] == LEASES.plural:
            return await self.take_lease(request)
        if request.method != "GET" or len(rest) > 1:
            return web.json_response(
                {"reason": "Forbidden", "message": "it only lists"}, status=404 if len(rest) > 1 else 403
            )
        if request.query.get("watch") == "true":
            response = web.StreamResponse()
            await response.prepare(request)
            await asyncio.sleep(3600)
            return response
        return self.page(rest[0], request)

    def page(self, plural: str, request: web.Request) -> web.Response:
        texts = self.objects.get(self.by_plural[plural].kind, [])
        begin, limit = int(request.query.get("continue", "0")), int(request.query.get("limit", "1000000"))
        end = begin + limit
        after = json.dumps(str(end) if end < len(texts) else "")
        head = f'{{"metadata": {{"resourceVersion": "1000000", "continue": {after}}}, "items": ['
        return web.Response(text=head + ",".join(texts[begin:end]) + "]}", content_type="application/json")

    async def take_lease(self, request: web.Request) -> web.Response:
        if request.method != "GET":
            self.lease = await request.json()
            self.lease["metadata"] |= {
                "uid": "lease",
                "resourceVersion": str(int(self.lease["metadata"].get("resourceVersion", 0)) + 1),
            }
        return web.json_response(self.lease or {"reason": "NotFound"}, status=200 if self.lease else 404)

    def discovery(self, version: str, parts: list[str]) -> Any:
        if parts == ["api"]:
            return {"versions": ["v1"]}
        versions = sorted({each.api_version for each in KINDS.values() if "/" in each.api_version})
        if parts == ["apis"]:
            groups = [
                {
                    "name": each.split("/")[0],
                    "versions": [{"groupVersion": each, "version": each.split("/")[1]}],
                    "preferredVersion": {"groupVersion": each, "version": each.split("/")[1]},
                }
                for each in versions
            ]
            return {"groups": groups}
        verbs = ["get", "list", "watch", "patch", "create", "delete"]
        of_version = [each for each in KINDS.values() if each.api_version == version]
        named = [
            {"name": each.plural, "singularName": "", "kind": each.kind, "namespaced": True, "verbs": verbs}
            for each in of_version
        ]
        if version == "v1":
            # Kopf waits until it has heard of them.
            named.append(
                {"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": False, "verbs": verbs}
            )
        return {"resources": named}


def resident_mib(program: OperatorProgram) -> tuple[float, float]:
    """Now, and at most until now."""
    status = Path(f"/proc/{program.pid}/status").read_text()
    now, most = (re.search(rf"^{name}:\s+(\d+) kB", status, re.M) for name in ("VmRSS", "VmHWM"))
    assert now is not None
    assert most is not None
    return int(now[1]) / KIB_OF_A_MIB, int(most[1]) / KIB_OF_A_MIB


async def measure(said: argparse.Namespace) -> None:
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    lister = Lister(said)
    runner.app.router.add_route("*", "/{path:.*}", lister.take)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", free_port())
    await site.start()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["KUBECONFIG"] = str(write_kubeconfig(Path(folder), site.name))
        counts = {kind: len(texts) for kind, texts in sorted(lister.objects.items())}
        print(f"lists of {counts}")
        async with operator_program(settings_for(NAMESPACE, lease_seconds=60)) as program:
            for _ in range(said.looks):
                await asyncio.sleep(20)
                now, most = resident_mib(program)
                print(f"{now:.0f} MiB resident, {most:.0f} at most, of {LIMIT_MIB}", flush=True)
        if said.log:
            print(program.log[-4000:])
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=5000, help="in all, one of each session among them")
    parser.add_argument("--strangers", type=int, default=5000, help="claims of others")
    parser.add_argument("--looks", type=int, default=6, help="20 s apart")
    parser.add_argument("--log", action="store_true", help="the end of the operator's log")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
