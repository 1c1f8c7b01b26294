"""The headless Service that gives the pods of a workload their name."""

from __future__ import annotations

from tinsmith_operator.build.metadata import child_metadata, sealed, selector_labels
from tinsmith_operator.model.base import Manifest
from tinsmith_operator.model.names import RPC_PORT
from tinsmith_operator.model.owner import Owner


def build_service(owner: Owner) -> Manifest:
    """It names pods that are not ready too: the API server speaks to a worker that still replays, and to a sampler that
    takes nothing new any more."""
    return sealed(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": child_metadata(owner, owner.workload_name),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": selector_labels(owner),
                "ports": [{"name": "rpc", "port": RPC_PORT, "targetPort": "rpc", "protocol": "TCP"}],
            },
        }
    )
