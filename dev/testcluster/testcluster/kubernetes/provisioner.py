"""The provisioner of volumes for the storage classes `local` and `shared`.

A volume is a folder in a directory of the machine.

The provisioner is a process of the cluster: `python -m testcluster.kubernetes.provisioner KUBECONFIG DIRECTORY`. After
each change of a claim or volume, all claims and volumes are checked again, so a missed event does no harm.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from kubernetes.client import ApiException, CoreV1Api
from kubernetes.config import load_kube_config
from kubernetes.utils.quantity import parse_quantity
from kubernetes.watch import Watch

PROVISIONER = "tinsmith.dev/test-volumes"
LOCAL, SHARED = "local", "shared"
_PROVISIONED_BY = "pv.kubernetes.io/provisioned-by"
_SELECTED_NODE = "volume.kubernetes.io/selected-node"
_CONFLICT, _NOT_FOUND = 409, 404
_RETRY_SECONDS = 1.0
_WATCH_SECONDS = 300

Document = dict[str, Any]


def requested_volume(claim: Document, directory: Path) -> Document | None:
    """Return the volume to create for the claim.

    Return None if the claim needs no volume yet, or if another provisioner makes the volume.
    """
    spec, metadata = claim["spec"], claim["metadata"]
    storage_class = spec.get("storageClassName")
    if spec.get("volumeName") or storage_class not in (LOCAL, SHARED) or metadata.get("deletionTimestamp"):
        return None
    node = metadata.get("annotations", {}).get(_SELECTED_NODE)
    if storage_class == LOCAL and node is None:
        return None
    path = str(directory / f"pvc-{metadata['uid']}")
    volume_spec: Document = {
        "capacity": {"storage": spec["resources"]["requests"]["storage"]},
        "accessModes": spec["accessModes"],
        "volumeMode": "Filesystem",
        "persistentVolumeReclaimPolicy": "Delete",
        "storageClassName": storage_class,
        "claimRef": {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
    if storage_class == LOCAL:
        volume_spec |= {"local": {"path": path}, "nodeAffinity": _only_on(node)}
    else:
        volume_spec |= {"hostPath": {"path": path, "type": "Directory"}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"pvc-{metadata['uid']}", "annotations": {_PROVISIONED_BY: PROVISIONER}},
        "spec": volume_spec,
    }


def _only_on(node: str) -> Document:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    return {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}}


def requested_capacity(claim: Document, volume: Document) -> str | None:
    """Return the size to which a bound volume must grow, or None if the volume is large enough."""
    requested: str = claim["spec"]["resources"]["requests"]["storage"]
    return requested if _bytes(requested) > _bytes(volume["spec"]["capacity"]["storage"]) else None


def _bytes(quantity: str) -> Decimal:
    parsed: Decimal = parse_quantity(quantity)  # type: ignore[no-untyped-call]
    return parsed


def is_released(volume: Document) -> bool:
    """Return whether the claim of the volume is gone and the files of the volume must be deleted."""
    phase, policy = volume.get("status", {}).get("phase"), volume["spec"]["persistentVolumeReclaimPolicy"]
    return (phase, policy) == ("Released", "Delete")


class Provisioner:
    def __init__(self, api: CoreV1Api, directory: Path) -> None:
        self._api = api
        self._directory = directory
        self._changed = threading.Event()

    def run(self) -> None:
        """Create and delete volumes until the process ends."""
        for list_all in (self._api.list_persistent_volume_claim_for_all_namespaces, self._api.list_persistent_volume):
            threading.Thread(target=self._watch, args=(list_all,), daemon=True).start()
        while True:
            self._changed.wait()
            self._changed.clear()
            try:
                self.look_at_all()
            except Exception as error:
                # The API server may be unavailable for a while. The next list finds all remaining work.
                _log(f"will look again: {error}")
                time.sleep(_RETRY_SECONDS)
                self._changed.set()

    def look_at_all(self) -> None:
        volumes = {volume["metadata"]["name"]: volume for volume in self._list(self._api.list_persistent_volume)}
        mine = {
            name: volume
            for name, volume in volumes.items()
            if volume["metadata"].get("annotations", {}).get(_PROVISIONED_BY) == PROVISIONER
        }
        for claim in self._list(self._api.list_persistent_volume_claim_for_all_namespaces):
            bound = mine.get(claim["spec"].get("volumeName", ""))
            if bound is not None:
                self._grow(claim, bound)
            elif (volume := requested_volume(claim, self._directory)) is not None:
                self._create(volume)
        for volume in filter(is_released, mine.values()):
            self._delete(volume)

    def _create(self, volume: Document) -> None:
        name = volume["metadata"]["name"]
        folder = self._directory / name
        folder.mkdir(exist_ok=True)
        # Any user in a pod may write. The umask would remove bits from a mode given to mkdir.
        folder.chmod(0o777)
        try:
            self._api.create_persistent_volume(volume)  # type: ignore[arg-type]
        except ApiException as error:
            if error.status != _CONFLICT:
                raise
        else:
            _log(f"made {name}")

    def _grow(self, claim: Document, volume: Document) -> None:
        capacity = requested_capacity(claim, volume) or volume["spec"]["capacity"]["storage"]
        if capacity != volume["spec"]["capacity"]["storage"]:
            self._api.patch_persistent_volume(volume["metadata"]["name"], {"spec": {"capacity": {"storage": capacity}}})
        is_bound = claim.get("status", {}).get("phase") == "Bound"
        if is_bound and claim["status"]["capacity"]["storage"] != capacity:
            self._api.patch_namespaced_persistent_volume_claim_status(
                claim["metadata"]["name"],
                claim["metadata"]["namespace"],
                {"status": {"capacity": {"storage": capacity}}},
            )
            _log(f"grew {volume['metadata']['name']} to {capacity}")

    def _delete(self, volume: Document) -> None:
        name = volume["metadata"]["name"]
        shutil.rmtree(self._directory / name, ignore_errors=True)
        try:
            self._api.delete_persistent_volume(name)
        except ApiException as error:
            if error.status != _NOT_FOUND:
                raise
        _log(f"deleted {name}")

    def _watch(self, list_all: Callable[..., Any]) -> None:
        while True:
            try:
                since = list_all().metadata.resource_version
                changes = _changes(list_all, since)
                self._changed.set()
                for _ in changes:
                    self._changed.set()
            except Exception as error:
                _log(f"will watch again: {error}")
                time.sleep(_RETRY_SECONDS)

    def _list(self, list_all: Callable[..., Any]) -> list[Document]:
        items: list[Document] = self._api.api_client.sanitize_for_serialization(list_all())["items"]
        return items


def _changes(list_all: Callable[..., Any], since: str) -> Iterator[Document]:
    watch: Any = Watch()  # type: ignore[no-untyped-call]
    changes: Iterator[Document] = watch.stream(list_all, resource_version=since, timeout_seconds=_WATCH_SECONDS)
    return changes


def _log(sentence: str) -> None:
    print(sentence, flush=True)


def main() -> None:
    kubeconfig, directory = sys.argv[1], Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    load_kube_config(kubeconfig)  # type: ignore[no-untyped-call]
    Provisioner(CoreV1Api(), directory).run()


if __name__ == "__main__":
    main()
