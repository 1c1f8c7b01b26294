"""The enforcer of NetworkPolicies.

The enforcer updates the rules of every node to match the NetworkPolicies, pods and namespaces of the cluster.

The enforcer is a process of the cluster: `python -m testcluster.policies.enforcer KUBECONFIG SOCKET
NETWORK_NAMESPACE…`. Through the socket, the CNI plugin reports the address of each pod, and waits for the answer.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kubernetes.client import CoreV1Api, NetworkingV1Api
from kubernetes.config import load_kube_config
from kubernetes.watch import Watch
from typing_extensions import override

from testcluster.commands import run
from testcluster.policies.isolation import Document, World, described
from testcluster.policies.rules import table

PODS, NAMESPACES, POLICIES = KINDS = ("pods", "namespaces", "policies")
IN_FORCE = "in force"
_WAIT_SECONDS = 30.0
_RETRY_SECONDS = 1.0
_WATCH_SECONDS = 300


class Enforcer:
    """The observed state of the cluster, and the rules that are in force."""

    def __init__(self, put_in_force: Callable[[str], None]) -> None:
        self._put_in_force = put_in_force
        self._in_force = ""
        self._known: dict[str, dict[str, Document]] = {}
        self._sandboxes: dict[str, tuple[str, str]] = {}
        self._changed = threading.Condition()

    def listed(self, kind: str, documents: Iterable[Document]) -> None:
        """Return all objects of a kind."""
        with self._changed:
            self._known[kind] = {document["metadata"]["uid"]: document for document in documents}
            self._refresh()

    def seen(self, kind: str, change: str, document: Document) -> None:
        with self._changed:
            uid = document["metadata"]["uid"]
            if change == "DELETED":
                self._known[kind].pop(uid, None)
            else:
                self._known[kind][uid] = document
            self._refresh()

    def admit(self, container: str, uid: str, address: str) -> None:
        """Wait until the policies for the pod are in force. Raises TimeoutError if the pod remains unknown."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_complete() and uid in self._known[PODS], _WAIT_SECONDS):
                raise TimeoutError(f"the API server names no pod {uid}")
            self._sandboxes[container] = (uid, address)
            self._refresh()

    def release(self, container: str) -> None:
        """Release the address of the pod."""
        with self._changed:
            if self._sandboxes.pop(container, None) is not None:
                self._refresh()

    def _is_complete(self) -> bool:
        return len(self._known) == len(KINDS)

    def _refresh(self) -> None:
        if self._is_complete() and (wanted := table(self._world())) != self._in_force:
            self._put_in_force(wanted)
            self._in_force = wanted
        self._changed.notify_all()

    def _world(self) -> World:
        pods = self._known[PODS]
        return World(
            policies=[self._known[POLICIES][uid] for uid in sorted(self._known[POLICIES])],
            namespaces={
                namespace["metadata"]["name"]: namespace["metadata"].get("labels", {})
                for namespace in self._known[NAMESPACES].values()
            },
            pods=[described(pods[uid], address) for uid, address in self._sandboxes.values() if uid in pods],
        )


class _Question(socketserver.StreamRequestHandler):
    enforcer: Enforcer

    @override
    def handle(self) -> None:
        asked = json.loads(self.rfile.readline())
        try:
            if "address" in asked:
                self.enforcer.admit(asked["container"], asked["uid"], asked["address"])
            else:
                self.enforcer.release(asked["container"])
            answer = IN_FORCE
        except Exception as error:
            # The pod does not start in this case, and the kubelet tries again.
            answer = f"{error}"
            _log(f"{asked}: {error}")
        self.wfile.write(f"{answer}\n".encode())


def _watch(kind: str, list_all: Callable[..., Any], enforcer: Enforcer) -> None:
    to_documents = list_all.__self__.api_client.sanitize_for_serialization  # type: ignore[attr-defined]
    while True:
        try:
            listed = list_all()
            enforcer.listed(kind, to_documents(listed)["items"])
            watch: Any = Watch()  # type: ignore[no-untyped-call]
            since = listed.metadata.resource_version
            for event in watch.stream(list_all, resource_version=since, timeout_seconds=_WATCH_SECONDS):
                enforcer.seen(kind, event["type"], event["raw_object"])
        except Exception as error:
            # The API server may be unavailable for a while. Afterwards all objects are listed again.
            _log(f"will watch {kind} again: {error}")
            time.sleep(_RETRY_SECONDS)


def _on_every_node(namespaces: list[str]) -> Callable[[str], None]:
    def put_in_force(rules: str) -> None:
        for namespace in namespaces:
            run("nsenter", f"--net={namespace}", "nft", "--file", "-", stdin=rules)

    return put_in_force


def _log(sentence: str) -> None:
    print(sentence, flush=True)


def main() -> None:
    kubeconfig, socket, *namespaces = sys.argv[1:]
    load_kube_config(kubeconfig)  # type: ignore[no-untyped-call]
    enforcer = _Question.enforcer = Enforcer(_on_every_node(namespaces))
    lists = (
        CoreV1Api().list_pod_for_all_namespaces,
        CoreV1Api().list_namespace,
        NetworkingV1Api().list_network_policy_for_all_namespaces,
    )
    for kind, list_all in zip(KINDS, lists, strict=True):
        threading.Thread(target=_watch, args=(kind, list_all, enforcer), daemon=True).start()
    Path(socket).unlink(missing_ok=True)
    with socketserver.ThreadingUnixStreamServer(socket, _Question) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
