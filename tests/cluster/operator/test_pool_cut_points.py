"""An operator dies between any two of its writes about a pool, as does each of its successors.

The Deployment counts the templates that it has had, so a roll too many is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
from cluster.operator.test_cut_points import Life, Step, live
from support.kubernetes.kubectl import KubectlUser, Kubelet, whole_namespace
from support.operator.operators import comes_to_rest, eventually, pool_manifest
from tinsmith_operator.kube.resources import POOLS

CREATION, ROLL = "created", "rolled and scaled"
WRITES_PER_REIGN = 4
# Changes of the status that come together are one write. So many come whatever happens.
FEWEST_WRITES = 13
NEW_IMAGE = "tinsmith.local/tinsmith/trainer:0.2.0"


def change(**spec: Any) -> Step:
    return lambda hands: hands.patch(POOLS, "tiny", {"spec": spec})


async def is_ready(hands: KubectlUser) -> Any:
    return await comes_to_rest(hands, "ReplicasReady", resource=POOLS)


LIFE: Life = (
    (CREATION, lambda hands: hands.create(POOLS, pool_manifest()), is_ready),
    (ROLL, change(replicas=2, pod={"image": NEW_IMAGE}), is_ready),
)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, str]:
    """Return the undisturbed run, which the first test makes."""
    return {}


async def reference(hands: KubectlUser, undisturbed: dict[str, str]) -> dict[str, str]:
    """Run the undisturbed life before the first disturbed one, in the same namespace."""
    if not undisturbed:
        states, succession = await live(hands, LIFE)
        assert succession.reigns[0].count >= FEWEST_WRITES
        undisturbed.update(states)
        await hands.delete(POOLS, "tiny")

        async def is_gone() -> bool:
            return not any(item["metadata"].get("ownerReferences") for item in await whole_namespace(hands))

        await eventually(is_gone, "the pool is gone, and all that belonged to it", pause_seconds=0.2)
    return undisturbed


@pytest.mark.parametrize("first_cut", range(1, WRITES_PER_REIGN + 1))
async def test_a_pools_successors_end_where_an_undisturbed_operator_does(
    hands: KubectlUser, kubelet: Kubelet, undisturbed: dict[str, str], first_cut: int
) -> None:
    states = await reference(hands, undisturbed)
    _, succession = await live(hands, LIFE, states, first_cut, WRITES_PER_REIGN)
    assert succession.deaths >= (FEWEST_WRITES - first_cut) // WRITES_PER_REIGN
