"""Ranks on GPUs, one on each, as Ray's actors that have Miles: on a placement of ours, since Miles' moves weekly."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from tinsmith_trainer.engines.megatron.factory import RanksRequest
from tinsmith_trainer.engines.megatron.model.ranked_model import check_no_code, ranked_model
from tinsmith_trainer.engines.megatron.ray_cluster import GPU_VARIABLES, RayCluster
from tinsmith_trainer.engines.megatron.ray_ranks import ON_GPUS, RankPlacement, RayRanks, start_ranks_on
from tinsmith_trainer.engines.miles.arguments import miles_arguments, sizes_of
from tinsmith_trainer.engines.miles.rank import MilesRank

MILES_VARIABLES: Mapping[str, str] = {
    # Those of `allocate_gpus_for_actor` (`miles/ray/train/actor_factory.py`): SGLang and NVSHMEM, which share the
    # image, have NCCL without them; and a rank sees all GPUs of its node and takes the one that Ray gave it.
    "NCCL_CUMEM_ENABLE": "0",
    "NVSHMEM_DISABLE_NCCL": "1",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
    # Megatron asserts it of tensor ranks, but on the newest GPUs: communication is queued in the order of the program.
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # The same sums in a replay as before the crash.
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
PASSED_ON = (
    *("NCCL_", "GLOO_", "NVSHMEM_", "UCX_", "FI_"),
    *("CUDA_", "NVTE_", "TORCH_", "PYTORCH_", "TRITON_", "HF_HUB_OFFLINE"),
)
"""What an installation tells a node's libraries of its network and GPUs. What is above stands."""


def start_miles_ranks(request: RanksRequest) -> tuple[RayRanks, torch.dtype]:
    """Returns when all ranks hold their part of the model, read from `directory` by each of them: minutes.

    Also in which type they hold it, which is the folder's.

    Raises ModelDirectoryInvalid, before Ray is asked where that can be known, and ServerError.
    """
    wanted, parallelism = request.wanted, request.wanted.parallelism
    check_no_code(request.directory, "Miles")
    model = ranked_model(request.directory, request.info, request.settings)
    sizes = sizes_of(request.directory)
    arguments = miles_arguments(model, sizes, parallelism, nodes=wanted.nodes)
    cluster = RayCluster(wanted.ray_address, cpus=parallelism.world_size, gpus=wanted.gpus_per_node, shows_actors=True)
    ranks = start_ranks_on(
        parallelism,
        wanted.nodes,
        ON_GPUS,
        lambda places: _start(arguments, request, places),
        at_close=cluster.close,
    )
    return ranks, getattr(torch, sizes.dtype)


def _start(arguments: list[str], request: RanksRequest, places: RankPlacement) -> None:
    parallelism, environment = request.wanted.parallelism, rank_environment(os.environ)
    for rank in range(parallelism.world_size):
        places.start(MilesRank, arguments, parallelism, rank, environment=environment)
    places.meet()


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a rank has beside its node's own: nothing of the driver's that is secret, nor which GPUs are its."""
    told = {
        name: value for name, value in environment.items() if name.startswith(PASSED_ON) and name not in GPU_VARIABLES
    }
    return {**told, **MILES_VARIABLES}
