"""The actions of the Deployment's controller, the kubelet and people around one pool."""

from __future__ import annotations

import copy
import hashlib
import json
from typing import Any

from support.operator.model_cluster import AUTHORITY, ModelCluster, Place
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import certificate_secret_name
from tinsmith_operator.api.sampler_pool import parse_pool
from tinsmith_operator.common.actions import Decision
from tinsmith_operator.common.observed import ObservedPool, ReadJournal, WorkerReport
from tinsmith_operator.pool.decision import decide_pool


class PoolWorld(ModelCluster):
    """A pool and its surroundings."""

    def __init__(self, pool: Manifest) -> None:
        super().__init__(pool)
        self.child = f"{self.name}-sampler"
        self.read_journal: ReadJournal | None = None  # its model is on a session's journal
        self.broken_images: set[str] = set()  # no node can pull them
        self.quota: int | None = None  # pods that the namespace may have
        self.templates: list[Manifest] = []  # every one that pods were made from
        self.reports: dict[str, WorkerReport] = {}

    # --- what the operator sees and decides

    def observe(self) -> ObservedPool:
        assert self.owner is not None
        secret = self.get("Secret", certificate_secret_name(self.child))
        return ObservedPool(
            pool=parse_pool(self.owner),
            authority_fingerprint=AUTHORITY,
            workload=self.get("Deployment", self.child),
            service=self.get("Service", self.child),
            read_journal=self.read_journal,
            policy=self.get("NetworkPolicy", self.child),
            budget=self.get("PodDisruptionBudget", self.child),
            certificate_secret=secret,
            pods=tuple(copy.deepcopy(pod) for pod in self.pods()),
            certificate=self.certificates.get(secret["metadata"]["uid"]) if secret is not None else None,
            warnings=tuple(self.warnings),
            stored=self.stored,
            reports=dict(self.reports),
        )

    def decide(self) -> Decision:
        return decide_pool(self.observe(), self.installation, self.now)

    # --- what others do

    def person_edits(self, place: Place) -> None:
        """Edit replicas, the template or a label, as with `kubectl edit`."""
        live = self.objects.get(place)
        if live is None:
            return
        live["metadata"]["labels"] = {**live["metadata"].get("labels", {}), "app.kubernetes.io/component": "edited"}
        live["metadata"]["managedFields"] = [{"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": {}}}]
        if place[0] == "Deployment":
            live["spec"]["replicas"] += 1
            live["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
            live["metadata"]["generation"] += 1
        live["metadata"]["resourceVersion"] = self._version()

    def controller_works(self) -> None:
        """Do the Deployment controller's work with a surge of one: make a pod, and delete one that is not needed."""
        deployment = self.objects.get(("Deployment", self.child))
        if deployment is None:
            return
        desired, current = deployment["spec"]["replicas"], _revision(deployment["spec"]["template"])
        staying = self._staying()
        new = [pod for pod in staying if pod["metadata"]["labels"]["pod-template-hash"] == current]
        old = [pod for pod in staying if pod not in new]
        refused = False
        if len(new) < desired and len(staying) <= desired:
            refused = not self._make_pod(deployment, current)
        elif (surplus := _surplus(new, old, desired)) is not None:
            self.person_deletes(("Pod", surplus["metadata"]["name"]))
        self._report(deployment, current, refused=refused)

    def kubelet_works(self) -> None:
        """Pods that can start do; those that shall go are gone."""
        for pod in self.pods():
            image = pod["spec"]["containers"][0]["image"]
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects["Pod", pod["metadata"]["name"]]
            elif image in self.broken_images:
                self._set_state(pod, {"waiting": {"reason": "ImagePullBackOff", "message": "not there"}}, ready=False)
            elif not _is_ready(pod):
                self._set_state(pod, {"running": {"startedAt": format_time(self.now)}}, ready=True)

    def replicas_report(self, *, idle_seconds: float) -> None:
        for pod in self._staying():
            uid = pod["metadata"]["uid"]
            self.reports[uid] = WorkerReport(uid, self.now, 0, 0, 64, 0.0, 0.0, None, False, idle_seconds)

    def a_pod_crashes(self, message: str = "") -> None:
        for pod in self._staying()[:1]:
            self._set_state(pod, {"waiting": {"reason": "CrashLoopBackOff"}}, ready=False)
            ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": message}}
            pod["status"]["containerStatuses"][0] |= {"lastState": ended, "restartCount": 4}

    def a_model_is_missing(self) -> None:
        self.a_pod_crashes(json.dumps({"reason": "ModelNotFound", "message": "nothing in /models/qwen"}))

    def a_node_is_lost(self) -> None:
        """Lose a node: its pod is marked by the node controller alone."""
        for pod in self._staying()[:1]:
            pod["status"]["conditions"] = [
                {"type": "Ready", "status": "False"},
                {"type": "ContainersReady", "status": "True"},
                {"type": "PodScheduled", "status": "True"},
            ]

    def cluster_works(self) -> None:
        for work in (self.controller_works, self.collector_works, self.kubelet_works):
            work()
        if deployment := self.objects.get(("Deployment", self.child)):
            self._report(deployment, _revision(deployment["spec"]["template"]))

    # ---

    def pods(self) -> list[Manifest]:
        return sorted(self._of_kind("Pod"), key=lambda pod: str(pod["metadata"]["name"]))

    def _staying(self) -> list[Manifest]:
        return [pod for pod in self.pods() if "deletionTimestamp" not in pod["metadata"]]

    def _make_pod(self, deployment: Manifest, revision: str) -> bool:
        if self.quota is not None and len(self.pods()) >= self.quota:
            return False
        template = copy.deepcopy(deployment["spec"]["template"])
        owner = {
            "kind": "ReplicaSet",
            "name": f"{self.child}-{revision}",
            "uid": deployment["metadata"]["uid"],
            "controller": True,
        }
        metadata = {
            **template["metadata"],
            "labels": {**template["metadata"]["labels"], "pod-template-hash": revision},
            "name": f"{self.child}-{revision}-{next(self._uids):04}",
            "ownerReferences": [owner],
        }
        self.add({"kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": {}})
        self.templates.append(template)
        return True

    def _report(self, deployment: Manifest, revision: str, *, refused: bool = False) -> None:
        staying = self._staying()
        updated = [pod for pod in staying if pod["metadata"]["labels"]["pod-template-hash"] == revision]
        before = (deployment.get("status") or {}).get("conditions", [])
        quota = 'pods "x" is forbidden: exceeded quota: pods, requested: pods=1, used: pods=1, limited: pods=1'
        failure: list[Any] = [{"type": "ReplicaFailure", "status": "True", "message": quota}]
        is_short = len(updated) < deployment["spec"]["replicas"]
        deployment["status"] = {
            "observedGeneration": deployment["metadata"]["generation"],
            "replicas": len(staying),
            "readyReplicas": len([pod for pod in staying if _is_ready(pod)]),
            "updatedReplicas": len(updated),
            "conditions": failure if refused else before if is_short else [],
        }

    def _set_state(self, pod: Manifest, state: Manifest, *, ready: bool) -> None:
        answer = "True" if ready else "False"
        pod["spec"]["nodeName"] = "node-1"
        pod["status"] = {
            "conditions": [{"type": kind, "status": answer} for kind in ("Ready", "ContainersReady")]
            + [{"type": "PodScheduled", "status": "True"}],
            "containerStatuses": [{"name": "worker", "state": state, "restartCount": 0, "imageID": "id"}],
        }


def _is_ready(pod: Manifest) -> bool:
    conditions = pod["status"].get("conditions", [])
    return any((each["type"], each["status"]) == ("Ready", "True") for each in conditions)


def _revision(template: Manifest) -> str:
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:10]


def _surplus(new: list[Manifest], old: list[Manifest], desired: int) -> Manifest | None:
    """Return the pod that may go: a surplus one, one that does not work, or an old one while enough others do."""
    if len(new) > desired:
        return new[-1]
    idle = [pod for pod in old if not _is_ready(pod)]
    if idle:
        return idle[0]
    return old[0] if old and len([pod for pod in (*new, *old) if _is_ready(pod)]) > desired else None
