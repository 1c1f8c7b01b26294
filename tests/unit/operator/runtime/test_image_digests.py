"""The digests that ready workers run are known by namespace and image."""

from __future__ import annotations

from typing import Any

import pytest
from support.operator.resources import IMAGE
from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import SESSION_KIND, SESSION_LABEL
from tinsmith_operator.kube.resources import Key
from tinsmith_operator.runtime.image_digests import ImageDigests

DIGEST = "tinsmith.local/tinsmith/trainer@sha256:" + "ab" * 32
OTHER_DIGEST = "tinsmith.local/tinsmith/trainer@sha256:" + "cd" * 32
MIRROR = "mirror.example.com/tinsmith/trainer:0.1.0"


def key(session: str) -> Key:
    return Key("research", session, SESSION_KIND)


def pod(
    session: str = "a", *, ready: str = "True", image: str = IMAGE, digest: str = DIGEST, **metadata: Any
) -> Manifest:
    labels = {SESSION_LABEL: session}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "research", "name": f"{session}-0", "labels": labels, **metadata},
        "spec": {"containers": [{"name": "worker", "image": image, "args": [f"--image={IMAGE}"]}]},
        "status": {
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{"name": "worker", "imageID": digest}],
        },
    }


def test_the_digest_of_a_ready_worker_is_known_in_its_namespace_only() -> None:
    digests = ImageDigests()
    digests.note(pod())
    assert digests.known("research", IMAGE) == DIGEST
    assert digests.known("production", IMAGE) is None
    assert digests.known("research", f"{IMAGE}-gpu") is None


@pytest.mark.parametrize(
    "unproven",
    [pod(ready="False"), pod(digest="sha256:" + "ab" * 32), pod(digest="debian@sha256:12"), pod(image=MIRROR)],
    ids=["not ready", "imported into the node", "another repository", "from a mirror"],
)
def test_a_worker_that_is_not_ready_or_runs_no_image_of_the_registry_proves_nothing(unproven: Manifest) -> None:
    digests = ImageDigests()
    digests.note(unproven)
    assert digests.known("research", IMAGE) is None


def test_a_pod_that_is_no_worker_changes_nothing() -> None:
    digests = ImageDigests()
    digests.note(pod())
    digests.note({**pod(), "spec": {"containers": [{"name": "member", "image": IMAGE}]}})
    digests.note(pod("b", labels={}))
    assert digests.known("research", IMAGE) == DIGEST


def test_the_digest_of_the_oldest_ready_worker_counts() -> None:
    digests = ImageDigests()
    digests.note(pod("a"))
    digests.note(pod("b", image=OTHER_DIGEST, digest=OTHER_DIGEST))
    assert digests.known("research", IMAGE) == DIGEST
    digests.forget(key("a"))
    assert digests.known("research", IMAGE) == OTHER_DIGEST


def test_a_digest_is_forgotten_with_its_last_ready_worker() -> None:
    digests = ImageDigests()
    digests.note(pod())
    digests.note(pod(ready="False"))
    assert digests.known("research", IMAGE) is None
    digests.forget(key("never noted"))
