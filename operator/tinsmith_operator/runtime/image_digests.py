"""The digests of the images that ready workers run.

A new session with the installation's default image starts with the digest that a ready worker of its namespace runs. So
all workers of a namespace run the same image even if its tag moves, and the operator need not write the digest into the
claim and the StatefulSet after the first start.
"""

from __future__ import annotations

from typing import NamedTuple

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import SESSION_KIND, SESSION_LABEL
from tinsmith_operator.common.pod import Pod
from tinsmith_operator.kube.resources import Key, labels_of
from tinsmith_operator.policy import repository_of


class _Running(NamedTuple):
    namespace: str
    image: str


class ImageDigests:
    """The digests, by namespace and name of the image."""

    def __init__(self) -> None:
        self._sessions: dict[Key, _Running] = {}
        self._digests: dict[_Running, dict[Key, str]] = {}

    def note(self, manifest: Manifest) -> None:
        """Record what the worker's pod of a session runs. A pod that is not ready proves nothing."""
        pod, session = Pod(manifest), labels_of(manifest).get(SESSION_LABEL)
        image, digest = pod.journal_image, pod.image_id
        if session is None or image is None:
            return
        namespace = str(manifest["metadata"]["namespace"])
        key = Key(namespace, session, SESSION_KIND)
        self.forget(key)
        if not pod.is_ready or digest is None or pod.image not in (image, digest) or not _is_digest_of(image, digest):
            return
        running = self._sessions[key] = _Running(namespace, image)
        self._digests.setdefault(running, {})[key] = digest

    def forget(self, session: Key) -> None:
        """Forget the pod of a session. The pod is gone."""
        running = self._sessions.pop(session, None)
        if running is None:
            return
        workers = self._digests[running]
        del workers[session]
        if not workers:
            del self._digests[running]

    def known(self, namespace: str, image: str) -> str | None:
        """Return the digest that a ready worker of the namespace runs under this name of the image."""
        return next(iter(self._digests.get(_Running(namespace, image), {}).values()), None)


def _is_digest_of(image: str, image_id: str) -> bool:
    """Return whether a registry can serve the image ID. An image that was imported into the node has no such ID."""
    repository, _, digest = image_id.partition("@")
    return digest.startswith("sha256:") and repository == repository_of(image)
