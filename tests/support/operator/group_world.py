"""The actions of KubeRay, the kubelets and accidents around a session of several pods.

KubeRay behaves as its controller is written: a pod that terminates counts as present, a cluster that was suspended says
so in a condition until it makes pods again, and a changed template starts no pod anew.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

from support.operator.model_cluster import Place
from support.operator.session_world import World
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import MEMBER_APPLICATION, QUEUE_LABEL
from tinsmith_operator.common.observed import Observed

FLAVOUR = {"example.com/gpu": "h200"}
TOLERATION = {"key": "gpus", "operator": "Exists"}
"""The labels of the nodes on which the queue finds room."""

Run = tuple[str, int]
"""The head: its pod's UID, and the restarts of its container."""


class GroupWorld(World):
    """kuberay: whether it is installed. joined: which run of the head each member's Ray belongs to."""

    def __init__(self, session: Manifest) -> None:
        super().__init__(session)
        self.workload_kind = "RayCluster"
        self.pod_name = f"{self.name}-head-x7k2p"
        self.kuberay = True
        self.joined: dict[str, Run] = {}
        self._numbers = itertools.count(1)

    def observe(self) -> Observed:
        problem = None if self.kuberay else "The cluster has no RayClusters: KubeRay is not installed."
        return replace(super().observe(), members=tuple(copy.deepcopy(self.members())), no_groups=problem)

    def members(self) -> list[Manifest]:
        labels = {pod["metadata"]["name"]: pod["metadata"].get("labels", {}) for pod in self._of_kind("Pod")}
        names = sorted(
            name for name, each in labels.items() if each.get("app.kubernetes.io/name") == MEMBER_APPLICATION
        )
        return [self.objects["Pod", name] for name in names]

    # --- what others do

    def controller_works(self) -> None:
        """KubeRay's."""
        cluster = self.objects.get(("RayCluster", self.name))
        if cluster is None or "deletionTimestamp" in cluster["metadata"]:
            return
        if cluster["spec"].get("suspend"):
            self._suspend(cluster)
        elif _is_suspended(cluster):
            _say_suspended(cluster, "False")
        else:
            self._make_pods(cluster)

    def kubelet_starts(self) -> None:
        """Start pods. The head serves when every member belongs to its run; a member joins the present run, once."""
        super().kubelet_starts()
        head = self._worker_pod()
        if head is None or not self._is_ready(head):
            return
        run = (head["metadata"]["uid"], head["status"]["containerStatuses"][0]["restartCount"])
        for member in self.members():
            if "deletionTimestamp" not in member["metadata"] and not self._is_ready(member):
                member["spec"]["nodeName"] = "node-2"
                self._set_container(member, {"running": {"startedAt": format_time(self.now)}}, ready=True)
                self.joined[member["metadata"]["uid"]] = run
        cluster = self.objects.get(("RayCluster", self.name))
        if cluster is None:  # its pods outlive it until Kubernetes collects them
            return
        wanted = cluster["spec"]["workerGroupSpecs"][0]["replicas"]
        if [self.joined[member["metadata"]["uid"]] for member in self._living_members()] != [run] * wanted:
            self._set_container(head, {"running": {"startedAt": format_time(self.now)}}, ready=False)

    def kubelet_stops(self) -> None:
        """Stop pods. A member stays until its head is gone."""
        super().kubelet_stops()
        if ("Pod", self.pod_name) in self.objects:
            head = self.objects["Pod", self.pod_name]["metadata"]
            if "deletionTimestamp" in head:
                return
        for member in self.members():
            if "deletionTimestamp" in member["metadata"]:
                del self.objects["Pod", member["metadata"]["name"]]

    def member_is_lost(self) -> None:
        """Lose a member with its node. The worker ends, since its ranks are gone."""
        for member in self.members()[:1]:
            del self.objects["Pod", member["metadata"]["name"]]
            self.container_ends(exit_code=1)

    def queue_takes(self) -> None:
        """Suspend an object with a queue's label, as Kueue's webhook does."""
        cluster = self.objects.get(("RayCluster", self.name))
        if cluster is not None and QUEUE_LABEL not in cluster["metadata"]["labels"]:
            cluster["metadata"]["labels"][QUEUE_LABEL] = "gpus"
            self._queue_writes(cluster, suspend=True)

    def queue_admits(self) -> None:
        """Admit the group to the nodes of a flavour. The queue owns what it adds to templates."""
        cluster = self.objects.get(("RayCluster", self.name))
        if cluster is None or not cluster["spec"].get("suspend") or QUEUE_LABEL not in cluster["metadata"]["labels"]:
            return
        for template in _templates(cluster):
            template["spec"]["nodeSelector"] = {**template["spec"].get("nodeSelector", {}), **FLAVOUR}
            template["spec"]["tolerations"] = [*template["spec"].get("tolerations", []), TOLERATION]
            template["metadata"]["labels"]["kueue.x-k8s.io/podset"] = "some"
        self._queue_writes(cluster, suspend=False)

    def queue_preempts(self) -> None:
        cluster = self.objects.get(("RayCluster", self.name))
        if cluster is not None and QUEUE_LABEL in cluster["metadata"]["labels"]:
            self._queue_writes(cluster, suspend=True)

    def person_edits(self, place: Place) -> None:
        super().person_edits(place)
        live = self.objects.get(place)
        if live is not None and place[0] == "RayCluster":
            live["spec"]["suspend"] = not live["spec"].get("suspend")
            live["spec"]["workerGroupSpecs"][0]["replicas"] = 7

    # ---

    def _queue_writes(self, cluster: Manifest, *, suspend: bool) -> None:
        cluster["spec"]["suspend"] = suspend
        fields = {"f:spec": {"f:suspend": {}, "f:headGroupSpec": {}, "f:workerGroupSpecs": {}}}
        cluster["metadata"]["managedFields"] = [{"manager": "kueue", "operation": "Update", "fieldsV1": fields}]
        cluster["metadata"]["resourceVersion"] = self._version()

    def _apply(self, manifest: Manifest, uid: str, resource_version: str) -> None:
        """Apply. Fields that the apply does not name stay with their other owners."""
        live = self.objects.get((manifest["kind"], manifest["metadata"]["name"]))
        if live is None or live["kind"] != "RayCluster" or "suspend" in manifest["spec"]:
            super()._apply(manifest, uid, resource_version)
            return
        labels, suspend = live["metadata"]["labels"], live["spec"].get("suspend", False)
        super()._apply(manifest, uid, resource_version)
        live["metadata"]["labels"] = {**labels, **live["metadata"]["labels"]}
        self._queue_writes(live, suspend=suspend)

    def _suspend(self, cluster: Manifest) -> None:
        pods = [pod for pod in self._of_kind("Pod") if self._controls(cluster, pod)]
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                self._delete(("Pod", pod["metadata"]["name"]), pod["metadata"]["uid"])
        if not pods:
            _say_suspended(cluster, "True")

    def _make_pods(self, cluster: Manifest) -> None:
        if ("Pod", self.pod_name) not in self.objects:
            self.add(self._ray_pod(cluster, self.pod_name, cluster["spec"]["headGroupSpec"]["template"]))
        [group] = cluster["spec"]["workerGroupSpecs"]
        for _ in range(group["replicas"] - len(self.members())):
            self.add(self._ray_pod(cluster, f"{self.name}-members-worker-{next(self._numbers):03}", group["template"]))
        for spare in self.members()[group["replicas"] :]:
            self._delete(("Pod", spare["metadata"]["name"]), spare["metadata"]["uid"])

    def _ray_pod(self, cluster: Manifest, name: str, template: Manifest) -> Manifest:
        pod = self._pod_of(cluster, template, name)
        pod["metadata"]["labels"]["ray.io/cluster"] = cluster["metadata"]["name"]
        return pod

    def _living_members(self) -> list[Manifest]:
        return [member for member in self.members() if "deletionTimestamp" not in member["metadata"]]


def _templates(cluster: Manifest) -> list[Manifest]:
    spec = cluster["spec"]
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


def _is_suspended(cluster: Manifest) -> bool:
    return cluster.get("status", {}).get("conditions") == [{"type": "RayClusterSuspended", "status": "True"}]


def _say_suspended(cluster: Manifest, status: str) -> None:
    cluster["status"] = {"conditions": [{"type": "RayClusterSuspended", "status": status}]}
