"""The operator dies between two of its writes about a pool, and another one takes over.

The model of a cluster plays every cut (tests/unit/operator/pool/test_pool_convergence.py); here are those of the
creation, and some of a roll. The Deployment counts the templates that it has had, so a roll too many is seen.
"""

from __future__ import annotations

from typing import Any

import pytest
from cluster.operator.test_cut_points import Life, Step, live
from support.kubernetes.kubectl import KubectlUser, Kubelet, whole_namespace
from support.operator.operators import comes_to_rest, eventually, pool_manifest
from tinsmith_operator.kube.resources import POOLS

# A decision of the creation is written by ten; later ones are mostly of the status.
# Changes of the status that come together are one write. So many come whatever happens.
CREATION, ROLL = "created", "rolled and scaled"
CUTS = (*((CREATION, cut) for cut in range(1, 11)), *((ROLL, cut) for cut in range(1, 4)))
NEW_IMAGE = "docker.io/tinsmith/trainer:0.2.0"


def change(**spec: Any) -> Step:
    return lambda hands: hands.patch(POOLS, "tiny", {"spec": spec})


async def is_ready(hands: KubectlUser) -> Any:
    return await comes_to_rest(hands, "ReplicasReady", resource=POOLS)


LIFE: Life = (
    (CREATION, lambda hands: hands.create(POOLS, pool_manifest()), is_ready),
    (ROLL, change(replicas=2, pod={"image": NEW_IMAGE}), is_ready),
)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """Filled by the first test."""
    return {}


async def test_an_undisturbed_operator_writes_all_that_is_certain(
    hands: KubectlUser, kubelet: Kubelet, undisturbed: dict[str, Any]
) -> None:
    states, writes = await live(hands, cut_before=0, life=LIFE)
    undisturbed.update(states=states)
    assert writes >= max(cut for _, cut in CUTS)


async def reference(hands: KubectlUser, undisturbed: dict[str, Any]) -> dict[str, str]:
    """Where one of the cuts is tested alone, the undisturbed life comes before it, in the same namespace."""
    if not undisturbed:
        states, _ = await live(hands, cut_before=0, life=LIFE)
        undisturbed.update(states=states)
        await hands.delete(POOLS, "tiny")

        async def is_gone() -> bool:
            return not any(item["metadata"].get("ownerReferences") for item in await whole_namespace(hands))

        await eventually(is_gone, "the pool is gone, and all that belonged to it")
    states: dict[str, str] = undisturbed["states"]
    return states


@pytest.mark.parametrize(("step", "cut_before"), CUTS)
async def test_a_pools_successor_ends_where_an_undisturbed_operator_does(
    hands: KubectlUser, kubelet: Kubelet, undisturbed: dict[str, Any], step: str, cut_before: int
) -> None:
    states = await reference(hands, undisturbed)
    _, made = await live(hands, cut_before, states, LIFE, counting_from=step)
    assert made >= cut_before, "the operator should have died"
