"""The actions of the StatefulSet's controller, the kubelet, the binder of claims and people around one session."""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

from support.operator.model_cluster import AUTHORITY, ModelCluster, Place
from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import certificate_secret_name, conversion_name, image_pull_name, pod_name
from tinsmith_operator.api.training_session import parse_session
from tinsmith_operator.common.actions import Decision
from tinsmith_operator.common.observed import Observed, ReadJournal, SnapshotAnswer, WorkerReport
from tinsmith_operator.policy import repository_of
from tinsmith_operator.session.decision import decide


class World(ModelCluster):
    """A session and its surroundings."""

    def __init__(self, session: Manifest) -> None:
        super().__init__(session)
        self.workload_kind = "StatefulSet"
        self.claim_holder: str | None = None  # an earlier session that names the same claim
        self.claim_reader: str | None = None  # an earlier session or pool that has its model there
        self.read_journal: ReadJournal | None = None  # its own model is on another session's journal
        self.pod_name = pod_name(self.name)
        self.report: WorkerReport | None = None
        self.snapshot: SnapshotAnswer | None = None
        self.converted_with: set[str] = set()  # images of Jobs that succeeded
        self.has_turn = False
        self.default_image_digest: str | None = None
        self.refusals: dict[str, str] = {}
        self.unpullable_images: set[str] = set()
        self.refused_images: dict[str, str] = {}  # image -> the one that its journal needs first

    @property
    def session(self) -> Manifest | None:
        return self.owner

    @session.setter
    def session(self, session: Manifest) -> None:
        self.owner = session

    # --- what the operator sees and decides

    def observe(self) -> Observed:
        assert self.session is not None
        session = parse_session(self.session)
        secret = self.get("Secret", certificate_secret_name(self.name))
        return Observed(
            session=session,
            authority_fingerprint=AUTHORITY,
            workload=self.get(self.workload_kind, self.name),
            service=self.get("Service", self.name),
            policy=self.get("NetworkPolicy", self.name),
            claim=self.get("PersistentVolumeClaim", session.claim_name),
            claim_holder=self.claim_holder,
            claim_reader=self.claim_reader,
            read_journal=self.read_journal,
            certificate_secret=secret,
            conversion=self.get("Job", conversion_name(self.name)),
            converters=tuple(copy.deepcopy(self.converters())),
            image_pull=self.get("Job", image_pull_name(self.name)),
            pullers=tuple(copy.deepcopy(self.pullers())),
            pod=self.get("Pod", self.pod_name),
            certificate=self.certificates.get(secret["metadata"]["uid"]) if secret is not None else None,
            report=self.report,
            snapshot=self.snapshot,
            warnings=tuple(self.warnings),
            stored=self.stored,
            refusals=self.refusals,
            default_image_digest=self.default_image_digest,
            has_turn=self.has_turn,
        )

    def decide(self) -> Decision:
        return decide(self.observe(), self.installation, self.now)

    def converters(self) -> list[Manifest]:
        return [pod for pod in self._of_kind("Pod") if pod["metadata"]["name"].startswith(conversion_name(self.name))]

    def pullers(self) -> list[Manifest]:
        return [pod for pod in self._of_kind("Pod") if pod["metadata"]["name"].startswith(image_pull_name(self.name))]

    # --- what others do

    def slow_snapshots(self, seconds: float) -> None:
        if self.report is not None:
            self.report = replace(self.report, snapshot_seconds=seconds)

    def person_edits(self, place: Place) -> None:
        """Labels, replicas, ports: whatever they can reach."""
        live = self.objects.get(place)
        if live is None or place[0] == "Pod":
            return
        live["metadata"]["labels"] = {**live["metadata"].get("labels", {}), "app.kubernetes.io/component": "edited"}
        if place[0] == "StatefulSet":
            live["spec"]["replicas"] = 1 - live["spec"]["replicas"]
            live["metadata"]["generation"] += 1
        live["metadata"]["resourceVersion"] = self._version()

    def controller_works(self) -> None:
        """Make and end the pod, as the StatefulSet's controller does, and set the observed generation."""
        workload = self.objects.get((self.workload_kind, self.name))
        if workload is None:
            return
        pod = self.objects.get(("Pod", self.pod_name))
        if workload["spec"]["replicas"] == 0 and pod is not None and self._controls(workload, pod):
            self._delete(("Pod", self.pod_name), pod["metadata"]["uid"])
        if workload["spec"]["replicas"] == 1 and pod is None:
            pod = self.add(self._new_pod(workload))
        replicas = 1 if pod is not None and self._controls(workload, pod) else 0
        workload["status"] = {"observedGeneration": workload["metadata"]["generation"], "replicas": replicas}

    def binder_works(self) -> None:
        """Delete a claim that was marked for it, when no pod with a node uses it."""
        is_used = any("nodeName" in pod["spec"] for pod in self._of_kind("Pod"))
        for claim in self._of_kind("PersistentVolumeClaim"):
            claim["status"] = {"phase": "Bound"}
            if "deletionTimestamp" in claim["metadata"] and not is_used:
                del self.objects["PersistentVolumeClaim", claim["metadata"]["name"]]

    def kubelet_starts(self) -> None:
        """Start the pod as far as it can get: ready, or refusing its volume."""
        pod = self._worker_pod()
        if pod is None or "deletionTimestamp" in pod["metadata"] or not self._can_mount(pod):
            return
        image = pod["spec"]["containers"][0]["image"]
        reference = next(
            argument.removeprefix("--image=")
            for argument in pod["spec"]["containers"][0]["args"]
            if argument.startswith("--image=")
        )
        pod["spec"]["nodeName"] = "node-1"
        if reference in self.refused_images:
            record = {"reason": "ImageChanged", "message": "replay first", "image": self.refused_images[reference]}
            self.container_ends(exit_code=3, message=json.dumps(record))
            return
        self.refused_images = {}
        self._set_container(pod, {"running": {"startedAt": format_time(self.now)}}, ready=True)
        status = pod["status"]["containerStatuses"][0]
        status["imageID"] = (
            image if "@" in image else f"{repository_of(image)}@sha256:{hashlib.sha256(image.encode()).hexdigest()}"
        )

    def kubelet_stops(self) -> None:
        pod = self._worker_pod()
        if pod is not None and "deletionTimestamp" in pod["metadata"]:
            del self.objects["Pod", self.pod_name]

    def container_ends(self, *, exit_code: int, reason: str = "Error", message: str = "") -> None:
        """End the container, which waits to be started again."""
        pod = self._worker_pod()
        if pod is None or "deletionTimestamp" in pod["metadata"]:
            return
        restarts = pod.get("status", {}).get("containerStatuses", [{}])[0].get("restartCount", 0)
        self._set_container(pod, {"waiting": {"reason": "CrashLoopBackOff"}}, ready=False)
        status = pod["status"]["containerStatuses"][0]
        status["restartCount"] = restarts + 1
        status["lastState"] = {"terminated": {"exitCode": exit_code, "reason": reason, "message": message}}

    def image_cannot_be_fetched(self) -> None:
        pod = self._worker_pod()
        if pod is not None:
            self._set_container(pod, {"waiting": {"reason": "ErrImageNeverPull"}}, ready=False)

    def worker_reports(
        self,
        *,
        adapters_used: int = 0,
        running_seconds: float = 0.0,
        volume_full: bool = False,
        idle_seconds: float = 0.0,
    ) -> None:
        pod = self._worker_pod()
        if pod is not None:
            uid = pod["metadata"]["uid"]
            numbers = (1, adapters_used, 8, running_seconds, 3.5)
            self.report = WorkerReport(uid, self.now, *numbers, self.now, volume_full, idle_seconds)

    def job_controller_works(self) -> None:
        """Make a pod while none exists that could still succeed, and report one that has."""
        job = self.objects.get(("Job", conversion_name(self.name)))
        if job is None or job.get("status"):
            return
        tries = [pod for pod in self.converters() if self._controls(job, pod)]
        phases = [pod["status"].get("phase") for pod in tries]
        if "Succeeded" in phases:
            job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
            self.converted_with.add(job["spec"]["template"]["spec"]["containers"][0]["image"])
        elif len(tries) > job["spec"]["backoffLimit"]:
            job["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "too many tries"}]}
        elif all(phase == "Failed" for phase in phases):
            self.add(self._pod_of(job, job["spec"]["template"], f"{conversion_name(self.name)}-{self._version()}"))

    def conversion_ends(self, phase: str, **terminated: Any) -> None:
        """End each conversion that is under way."""
        for pod in self.converters():
            if "phase" not in pod["status"]:
                self._set_container(pod, {"terminated": terminated}, ready=False)
                pod["status"]["phase"] = phase

    def converters_stop(self) -> None:
        for pod in self.converters():
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects["Pod", pod["metadata"]["name"]]

    def conversion_works(self) -> None:
        """Let a Job succeed."""
        self.converters_stop()
        self.conversion_ends("Succeeded", exitCode=0)
        self.job_controller_works()

    def image_pull_works(self) -> None:
        """Let the Job's pod pull its image, retry, and succeed once the image is there."""
        for pod in self.pullers():
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects["Pod", pod["metadata"]["name"]]
        job = self.objects.get(("Job", image_pull_name(self.name)))
        if job is None or job.get("status"):
            return
        template = job["spec"]["template"]
        pods = [pod for pod in self.pullers() if self._controls(job, pod)]
        pod = (
            pods[0]
            if pods
            else self.add(self._pod_of(job, template, f"{image_pull_name(self.name)}-{self._version()}"))
        )
        pod["spec"]["nodeName"] = "node-1"
        if template["spec"]["containers"][0]["image"] in self.unpullable_images:
            self._set_container(pod, {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}, ready=False)
            return
        self._set_container(pod, {"terminated": {"exitCode": 0}}, ready=False)
        pod["status"]["phase"] = "Succeeded"
        job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    def cluster_works(self) -> None:
        self.conversion_works()
        self.image_pull_works()
        for work in (self.controller_works, self.binder_works, self.collector_works, self.kubelet_stops):
            work()
        pod = self._worker_pod()
        if pod is not None and not self._is_ready(pod):
            self.kubelet_starts()
        if self.session is not None and "deletionTimestamp" in self.session["metadata"]:
            self.time_passes(timedelta(seconds=1))
            self.worker_reports()

    # ---

    def _worker_pod(self) -> Manifest | None:
        """Return the worker's pod, unless it belongs to another owner."""
        pod = self.objects.get(("Pod", self.pod_name))
        return pod if pod is not None and "ownerReferences" in pod["metadata"] else None

    def _new_pod(self, workload: Manifest) -> Manifest:
        return self._pod_of(workload, workload["spec"]["template"], self.pod_name)

    def _pod_of(self, workload: Manifest, template: Manifest, name: str) -> Manifest:
        template = copy.deepcopy(template)
        owner = {
            "apiVersion": workload["apiVersion"],
            "kind": workload["kind"],
            "name": workload["metadata"]["name"],
            "uid": workload["metadata"]["uid"],
            "controller": True,
        }
        metadata = {**template["metadata"], "name": name, "ownerReferences": [owner]}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"], "status": {}}

    def _can_mount(self, pod: Manifest) -> bool:
        """Return true if the pod's Secret and claim exist and are not being deleted."""
        session = parse_session(self.session) if self.session is not None else None
        claim_name = session.claim_name if session is not None else f"{self.name}-journal"
        claim = self.objects.get(("PersistentVolumeClaim", claim_name))
        secret = self.objects.get(("Secret", certificate_secret_name(self.name)))
        return claim is not None and "deletionTimestamp" not in claim["metadata"] and secret is not None

    def _set_container(self, pod: Manifest, state: Manifest, *, ready: bool) -> None:
        text = "True" if ready else "False"
        pod.setdefault("status", {})["conditions"] = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "ContainersReady", "status": text},
            {"type": "Ready", "status": text},
        ]
        status = (pod["status"].get("containerStatuses") or [{"name": "worker", "restartCount": 0}])[0]
        pod["status"]["containerStatuses"] = [{**status, "state": state, "ready": ready}]

    def _is_ready(self, pod: Manifest) -> bool:
        conditions = pod.get("status", {}).get("conditions", [])
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
