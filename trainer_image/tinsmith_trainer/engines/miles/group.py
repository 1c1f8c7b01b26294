"""Ranks as Ray actors with Miles, one rank on each GPU.

Tinsmith places the ranks itself, because Miles' code for placement changes every week.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from tinsmith_trainer.engines.base import Numerics
from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.model.ranked_model import check_no_code, ranked_model
from tinsmith_trainer.engines.megatron.ray_cluster import GPU_VARIABLES, RayCluster
from tinsmith_trainer.engines.megatron.ray_ranks import ON_GPUS, RankPlacement, RayRanks, start_ranks_on
from tinsmith_trainer.engines.miles.arguments import miles_arguments, sizes_of
from tinsmith_trainer.engines.miles.rank import MilesRank

MILES_VARIABLES: Mapping[str, str] = {
    # As in `allocate_gpus_for_actor` (`miles/ray/train/actor_factory.py`): for SGLang and NVSHMEM in the same image;
    # and a rank sees all GPUs of its node, and uses the one that Ray assigned.
    "NCCL_CUMEM_ENABLE": "0",
    "NVSHMEM_DISABLE_NCCL": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    # Megatron requires it for tensor ranks, except on the newest GPUs: communication is queued in program order.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}
DETERMINISTIC_VARIABLES: Mapping[str, str] = {
    # With `numerics: exact` a replay must compute the same sums as before the crash.
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
PASSED_ON = (
    *("NCCL_", "GLOO_", "NVSHMEM_", "UCX_", "FI_"),
    *("CUDA_", "NVTE_", "TORCH_", "PYTORCH_", "TRITON_", "HF_HUB_OFFLINE"),
)
"""Environment variables for the network and the GPUs of a node.

MILES_VARIABLES override these variables.
"""


def start_miles_ranks(request: RanksRequest) -> tuple[RayRanks, torch.dtype]:
    """Start the ranks, and return the ranks and the dtype of the weights.

    The ranks read the model from `directory`, which takes minutes.

    The files in `directory` have this dtype. Raises ModelDirectoryInvalid, before Ray starts if possible, and
    ServerError.
    """
    placement, parallelism = request.placement, request.placement.parallelism
    check_no_code(request.directory, "Miles")
    model = ranked_model(request.directory, request.info, request.settings)
    sizes = sizes_of(request.directory)
    arguments = miles_arguments(model, sizes, parallelism, nodes=placement.nodes)
    cluster = RayCluster(
        placement.ray_address, cpus=parallelism.world_size, gpus=placement.gpus_per_node, shows_actors=True
    )
    ranks = start_ranks_on(
        parallelism,
        placement.nodes,
        ON_GPUS,
        lambda places: _start(arguments, request, places),
        at_close=cluster.close,
    )
    return ranks, getattr(torch, sizes.dtype)


def _start(arguments: list[str], request: RanksRequest, places: RankPlacement) -> None:
    parallelism, environment = request.placement.parallelism, rank_environment(os.environ, request.settings.numerics)
    for rank in range(parallelism.world_size):
        places.start(MilesRank, arguments, parallelism, rank, environment=environment)
    places.meet()


def rank_environment(environment: Mapping[str, str], numerics: Numerics) -> dict[str, str]:
    """Return the variables that a rank gets in addition to the node's variables: no secrets, and no choice of GPUs."""
    forwarded = {
        name: value for name, value in environment.items() if name.startswith(PASSED_ON) and name not in GPU_VARIABLES
    }
    return {**forwarded, **MILES_VARIABLES, **(DETERMINISTIC_VARIABLES if numerics == "exact" else {})}
