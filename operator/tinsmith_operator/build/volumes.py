"""The volumes and mount paths in the pod of a worker or sampler, and the claim for the journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import JOURNAL_VOLUME, certificate_secret_name
from tinsmith_operator.api.serving_spec import ModelSource, ServingSpec, SourceType
from tinsmith_operator.api.training_session import TrainingSession
from tinsmith_operator.build.metadata import child_labels
from tinsmith_operator.installation import Installation

JOURNAL_PATH = "/var/lib/tinsmith/journal"
CHECKPOINTS_PATH = "/var/lib/tinsmith/checkpoints"
MODELS_PATH = "/models"
TLS_PATH = "/etc/tinsmith/tls"
HOME_PATH = "/home/tinsmith"
HUB_CACHE_PATH = f"{HOME_PATH}/huggingface"
SHARED_MEMORY_PATH = "/dev/shm"

SCRATCH_LIMIT = "1Gi"
HUB_CACHE_LIMIT = "512Gi"
"""The limit on the hub's cache. The limit is larger than the largest model that one node trains.

The disk of the node is the actual limit.
"""


class Mounted(NamedTuple):
    name: str
    path: str
    source: Manifest
    read_only: bool = False

    @property
    def volume(self) -> Manifest:
        return {"name": self.name, **self.source}

    @property
    def claim(self) -> str | None:
        name: str | None = self.source.get("persistentVolumeClaim", {}).get("claimName")
        return name


def pod_volumes(mounted: Sequence[Mounted]) -> list[Manifest]:
    """Return the volumes, with only one volume for each claim.

    A kubelet never starts a pod that has two volumes for the same claim.
    """
    return [each.volume for each in mounted if _volume_of(each, mounted) is each]


def mounts(mounted: Sequence[Mounted]) -> list[Manifest]:
    return [_mount(each, _volume_of(each, mounted).name) for each in mounted]


def _volume_of(mount: Mounted, mounted: Sequence[Mounted]) -> Mounted:
    """Return the mount that defines the claim's volume: the first mount that writes, otherwise the first mount."""
    alike = [each for each in mounted if each.claim == mount.claim] if mount.claim is not None else [mount]
    return next((each for each in alike if not each.read_only), alike[0])


def _mount(mounted: Mounted, volume: str) -> Manifest:
    mount = {"name": volume, "mountPath": mounted.path}
    return {**mount, "readOnly": True} if mounted.read_only else mount


def worker_volumes(session: TrainingSession, installation: Installation) -> list[Mounted]:
    journal = Mounted(JOURNAL_VOLUME, JOURNAL_PATH, claim_source(session.claim_name))
    return [journal, *serving_volumes(session.workload_name, session.spec, installation)]


def serving_volumes(workload_name: str, spec: ServingSpec, installation: Installation) -> list[Mounted]:
    """Return the volumes of a process that serves a model."""
    certificate = {"secret": {"secretName": certificate_secret_name(workload_name)}}
    volumes = [Mounted("tls", TLS_PATH, certificate, read_only=True), *model_volumes(spec)]
    if installation.checkpoint_claim is not None:
        volumes.append(Mounted("checkpoints", CHECKPOINTS_PATH, claim_source(installation.checkpoint_claim)))
    if (size := spec.pod.shared_memory) is not None:
        volumes.append(Mounted("shared-memory", SHARED_MEMORY_PATH, in_memory(size)))
    return volumes


def model_volumes(spec: ServingSpec) -> list[Mounted]:
    """Return the volumes of a process that loads a model."""
    return [
        Mounted("tmp", "/tmp", scratch(SCRATCH_LIMIT)),
        Mounted("home", HOME_PATH, scratch(SCRATCH_LIMIT)),
        _model(spec.model.source),
    ]


def _model(source: ModelSource) -> Mounted:
    match source.type:
        case SourceType.PERSISTENT_VOLUME_CLAIM:
            assert source.persistent_volume_claim is not None
            claim = source.persistent_volume_claim.claim_name
            return Mounted("models", MODELS_PATH, claim_source(claim, read_only=True), read_only=True)
        case SourceType.HUB:
            return Mounted("hub", HUB_CACHE_PATH, scratch(HUB_CACHE_LIMIT))


def claim_source(name: str, *, read_only: bool = False) -> Manifest:
    claim = {"claimName": name}
    return {"persistentVolumeClaim": {**claim, "readOnly": True} if read_only else claim}


def in_memory(size: int | str) -> Manifest:
    return {"emptyDir": {"medium": "Memory", "sizeLimit": str(size)}}


def scratch(limit: str) -> Manifest:
    return {"emptyDir": {"sizeLimit": limit}}


def build_claim(session: TrainingSession, annotations: Mapping[str, str]) -> Manifest | None:
    """Return the claim, or None if the spec names an existing claim.

    The claim has no owner reference, so Kubernetes does not delete the claim together with the session.
    """
    storage = session.spec.storage
    if storage.existing_claim is not None:
        return None
    spec: Manifest = {
        "accessModes": [storage.access_mode.value],
        "resources": {"requests": {"storage": str(storage.size)}},
        "volumeMode": "Filesystem",
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    metadata = {
        "name": session.claim_name,
        "namespace": session.namespace,
        "labels": child_labels(session),
        "annotations": dict(annotations),
    }
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def build_claim_annotations(session: TrainingSession, annotations: Mapping[str, str]) -> Manifest:
    """Return the annotations. In a claim that a user created, the operator writes only annotations."""
    metadata = {"name": session.claim_name, "namespace": session.namespace, "annotations": dict(annotations)}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
