"""The operator's part, played by a test: sessions and pools in a real Kubernetes API, their workers on this machine.

Workers are fakes behind real mutual TLS on loopback ports. A worker's id is the UID of a real volume claim. A pool's
replicas are in real EndpointSlices, which hold no loopback addresses: `reached_at` says where an endpoint really is.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from support.certificates import CLIENT, SERVER, Authority, mount_secret
from support.server.fake_worker import FakeWorker
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError
from testcluster.ports import free_port
from tinsmith_rpc import worker_pb2_grpc
from tinsmith_server.fleet.kubernetes.sampler_pool import Endpoint

API_SERVER_NAME = "api-server.tinsmith.internal"
MODEL = "org/tiny"
FINALIZER = "tinsmith.dev/claim"


def spec_of(model: str = MODEL, **fields: Any) -> dict[str, Any]:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models"}}
    return {"model": {"name": model, "source": source}, **fields}


@dataclass
class StandInWorker:
    """A fake worker with a certificate for its id."""

    worker_id: str
    authority: Authority
    port: int
    fake: FakeWorker = field(default_factory=FakeWorker)
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        leaf = self.authority.leaf(f"{self.worker_id}.worker.tinsmith.internal", usages=(SERVER,))
        credentials = grpc.ssl_server_credentials(
            [(leaf.key, leaf.certificate)], self.authority.certificate, require_client_auth=True
        )
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self.fake, self.server)
        assert self.server.add_secure_port(f"127.0.0.1:{self.port}", credentials) == self.port
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(None)
            self.server = None

    async def crash(self) -> None:
        """Restart the container: another instance at the same address."""
        await self.stop()
        self.fake.lose_memory()
        await self.start()


@dataclass
class StandInReplica:
    """One pod of a pool, as its EndpointSlice shows it."""

    pool: str
    number: int
    worker: StandInWorker
    pod_uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    serving: bool = True
    terminating: bool = False

    @property
    def fake(self) -> FakeWorker:
        return self.worker.fake

    @property
    def slice_name(self) -> str:
        return f"{self.pool}-sampler-{self.number}"

    def slice(self) -> dict[str, Any]:
        """Return a slice for the replica, since each has a port of its own.

        As in the Service, every address is "ready".
        """
        conditions = {"ready": True, "serving": self.serving, "terminating": self.terminating}
        target = {"kind": "Pod", "name": self.slice_name, "uid": self.pod_uid}
        endpoint = {"addresses": [f"10.99.0.{self.number}"], "conditions": conditions, "targetRef": target}
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": self.slice_name, "labels": {"tinsmith.dev/pool": self.pool}},
            "addressType": "IPv4",
            "endpoints": [endpoint],
            "ports": [{"name": "rpc", "port": self.worker.port}],
        }


def reached_at(endpoint: Endpoint) -> str:
    return f"127.0.0.1:{endpoint.port}"


class StandInOperator:
    """Level by level as a test wants it: a session can stay without a worker for as long as a test needs that."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.namespace = namespace
        self.authority = Authority()
        self.tls_directory = folder / "api-server-tls"
        self.renew_certificate()
        self.workers: dict[str, StandInWorker] = {}
        self.replicas: list[StandInReplica] = []
        self._cluster = cluster

    def renew_certificate(self) -> None:
        mount_secret(self.tls_directory, self.authority.leaf(API_SERVER_NAME, usages=(CLIENT,)), self.authority)

    async def close(self) -> None:
        for worker in (*self.workers.values(), *(replica.worker for replica in self.replicas)):
            await worker.stop()

    def title(self, name: str) -> str:
        """Return the server's name of a session or a pool."""
        return f"{self.namespace}/{name}"

    async def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        inside = f"--namespace={self.namespace}"
        return await asyncio.to_thread(self._cluster.kubectl, inside, *arguments, stdin=stdin)

    async def apply(self, name: str, *, finalizers: tuple[str, ...] = (), **spec: Any) -> None:
        metadata = {"name": name, "finalizers": list(finalizers)}
        manifest = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": "TrainingSession", "metadata": metadata}
        await self.kubectl("apply", "--filename=-", stdin=json.dumps({**manifest, "spec": spec_of(**spec)}))

    async def apply_template(self, name: str, **spec: Any) -> None:
        manifest = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": "SessionTemplate", "metadata": {"name": name}}
        await self.kubectl("apply", "--filename=-", stdin=json.dumps({**manifest, "spec": spec_of(**spec)}))

    async def apply_from_template(self, name: str, template: str) -> None:
        metadata = {"name": name, "labels": {"tinsmith.dev/template": template}}
        manifest = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": "TrainingSession", "metadata": metadata}
        spec = {"templateRef": {"name": template}}
        await self.kubectl("apply", "--filename=-", stdin=json.dumps({**manifest, "spec": spec}))

    async def run(self, name: str) -> StandInWorker:
        """Start the session's worker, with the volume of this name, and report it ready."""
        worker_id = await self.claim(name)
        worker = self.workers.setdefault(name, StandInWorker(worker_id, self.authority, free_port()))
        if worker.server is None:
            await worker.start()
        endpoint = f"127.0.0.1:{worker.port}"
        await self.say(name, ready=True, message="The worker answers.", workerId=worker_id, endpoint=endpoint)
        return worker

    async def claim(self, name: str) -> str:
        """Return the UID of the session's volume claim, which is made where there is none."""
        manifest = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": f"{name}-journal"},
            "spec": {"accessModes": ["ReadWriteOncePod"], "resources": {"requests": {"storage": "1Gi"}}},
        }
        await self.kubectl("apply", "--filename=-", stdin=json.dumps(manifest))
        return await self.kubectl(
            "get", "persistentvolumeclaim", f"{name}-journal", "--output=jsonpath={.metadata.uid}"
        )

    async def suspend(self, name: str) -> None:
        await self.kubectl("patch", "trainingsession", name, "--type=merge", '--patch={"spec":{"suspend":true}}')
        await self.say(name, ready=False, message="The session is suspended.")
        if name in self.workers:
            await self.workers[name].stop()

    async def pool_falls_asleep(self, name: str, suspended_at: str) -> None:
        patch = json.dumps({"status": {"idle": {"suspendedTime": suspended_at}}})
        await self.kubectl("patch", "samplerpool", name, "--subresource=status", "--type=merge", f"--patch={patch}")

    async def falls_asleep(self, name: str, suspended_at: str, *, used: int = 0, stops: bool = True) -> None:
        """Suspend the session as idle, as the operator does: in the status alone."""
        places = {"used": used, "capacity": 8, "summary": f"{used}/8"}
        await self.kubectl(
            "patch",
            "trainingsession",
            name,
            "--subresource=status",
            "--type=merge",
            "--patch=" + json.dumps({"status": {"idle": {"suspendedTime": suspended_at}, "adapters": places}}),
        )
        await self.say(name, ready=False, message="No client has used the session for 600 s.")
        if stops and name in self.workers:
            await self.workers[name].stop()

    async def wakes(self, name: str) -> StandInWorker:
        """End the suspension, as the operator does after a wake request."""
        patch = '--patch={"status":{"idle":{"suspendedTime":null}}}'
        await self.kubectl("patch", "trainingsession", name, "--subresource=status", "--type=merge", patch)
        return await self.run(name)

    async def wanted_time(self, kind: str, name: str) -> str:
        """Return the latest wake request of an API server, or an empty text."""
        return await self.kubectl("get", kind, name, "--output=jsonpath={.status.wantedTime}")

    async def resume(self, name: str) -> None:
        await self.kubectl("patch", "trainingsession", name, "--type=merge", '--patch={"spec":{"suspend":false}}')
        await self.run(name)

    async def say(
        self, name: str, *, ready: bool, message: str, stalled: bool = False, reason: str = "Said", **status: str
    ) -> None:
        conditions = [_condition("Ready", ready, message, reason), _condition("Stalled", stalled, message)]
        patch = json.dumps({"status": {"conditions": conditions, **status}})
        await self.kubectl("patch", "trainingsession", name, "--subresource=status", "--type=merge", f"--patch={patch}")

    async def delete(self, name: str) -> None:
        """Delete it without waiting for finalizers. A running worker continues."""
        await self.kubectl("delete", "trainingsession", name, "--wait=false")

    async def let_go(self, name: str) -> None:
        """Remove the finalizers, as the operator does once everything is saved."""
        patch = '--patch={"metadata":{"finalizers":null}}'
        await self.kubectl("patch", "trainingsession", name, "--type=merge", patch)

    async def apply_pool(self, name: str, **spec: Any) -> str:
        """Apply a pool, and return its UID."""
        manifest = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": "SamplerPool", "metadata": {"name": name}}
        await self.kubectl("apply", "--filename=-", stdin=json.dumps({**manifest, "spec": spec_of(**spec)}))
        return await self.kubectl("get", "samplerpool", name, "--output=jsonpath={.metadata.uid}")

    async def run_replica(self, pool: str) -> StandInReplica:
        """One more, in a pool that is there."""
        uid = await self.kubectl("get", "samplerpool", pool, "--output=jsonpath={.metadata.uid}")
        worker = StandInWorker(uid, self.authority, free_port())
        await worker.start()
        replica = StandInReplica(pool, len(self.replicas) + 1, worker)
        self.replicas.append(replica)
        await self.publish(replica)
        return replica

    async def publish(self, replica: StandInReplica) -> None:
        """Publish the replica's state as the cluster does."""
        await self.kubectl("apply", "--filename=-", stdin=json.dumps(replica.slice()))

    async def remove_replica(self, replica: StandInReplica) -> None:
        """Remove the replica's pod."""
        await replica.worker.stop()
        await self.kubectl("delete", "endpointslice", replica.slice_name)

    async def say_of_pool(self, name: str, *, ready: bool, message: str, reason: str = "Said") -> None:
        patch = json.dumps({"status": {"conditions": [_condition("Ready", ready, message, reason)]}})
        await self.kubectl("patch", "samplerpool", name, "--subresource=status", "--type=merge", f"--patch={patch}")

    async def session_names(self) -> list[str]:
        listed = await self.kubectl("get", "trainingsessions", "--output=jsonpath={.items[*].metadata.name}")
        return sorted(listed.split())

    async def session(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(await self.kubectl("get", "trainingsession", name, "--output=json"))
        return content

    async def until_gone(self, kind: str, name: str) -> None:
        try:
            await self.kubectl("wait", f"{kind}/{name}", "--for=delete", "--timeout=30s")
        except ClusterError as error:
            if "NotFound" not in str(error):
                raise


def _condition(type: str, holds: bool, message: str, reason: str = "Said") -> dict[str, Any]:
    status = "True" if holds else "False"
    time = "2026-01-01T00:00:00Z"
    return {"type": type, "status": status, "reason": reason, "message": message, "lastTransitionTime": time}
