"""A drain asks each pod to leave by the eviction API: of several, one at a time goes."""

from __future__ import annotations

import pytest
from support.kubernetes.installation import API_SERVER, Installation
from testcluster.errors import ClusterError

OPERATOR = "app.kubernetes.io/component=operator"


@pytest.mark.parametrize(("component", "selector"), [("api-server", API_SERVER), ("operator", OPERATOR)])
def test_one_replica_leaves_at_a_time_and_the_next_once_it_has_a_successor(
    component: str, selector: str, installation: Installation
) -> None:
    name = f"{installation.release}-{component}"
    pods = [pod for pod in installation.list("pod", selector) if "deletionTimestamp" not in pod["metadata"]]
    first, second = (pod["metadata"]["name"] for pod in pods)
    wait_budget(installation, name)
    installation.evict(first)
    with pytest.raises(ClusterError, match="disruption budget"):
        installation.evict(second)
    wait_budget(installation, name)
    installation.evict(second)
    wait_budget(installation, name)


def wait_budget(installation: Installation, name: str) -> None:
    """Wait until one replica may leave again."""
    allowed = "--for=jsonpath={.status.disruptionsAllowed}=1"
    installation.kubectl("rollout", "status", f"deployment/{name}", "--timeout=180s")
    installation.kubectl("wait", f"poddisruptionbudget/{name}", allowed, "--timeout=120s")
