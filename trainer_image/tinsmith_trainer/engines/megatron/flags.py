"""The settings of engines on ranks, and the flags that choose the place and the number of ranks.

This module imports no framework.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Literal

from tinsmith_trainer.engines.base import Numerics
from tinsmith_trainer.engines.batching import DEFAULT_TOKEN_BUDGET
from tinsmith_trainer.engines.megatron.parallelism import Parallelism

NEMO_RL = "nemo-rl"
MILES = "miles"
ENGINES = (NEMO_RL, MILES)
"""The engines that divide a model over ranks."""
DIVISIONS = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""The flags with the numbers of parts of a model. Their product is the number of ranks of one copy of the model."""


RankRecompute = Literal["none", "mlp", "layers"]
"""The part of each layer that ranks compute again in backward: no part, the feed-forward, or the whole layer."""


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """The limits of the engine on adapters, LoRA ranks and tokens.

    `numerics: exact` lets Miles' kernels on GPUs compute deterministically. On CPUs they always do.
    Every adapter takes as much memory as an adapter with LoRA rank `max_rank` on all modules. `token_budget` is the
    number of tokens of a microbatch on one data-parallel copy of the model; a longer datum runs alone. `token_budget`
    determines how sums are rounded, so a replay with another value gives other bits. `recompute` changes no bits.
    """

    numerics: Numerics = "exact"
    adapter_slots: int = 64
    max_rank: int = 128
    token_budget: int = DEFAULT_TOKEN_BUDGET
    recompute: RankRecompute = "none"
    map_stable_reinforce: bool = True


class RankFlags(argparse.Namespace):
    """The flags that were given. Omitted flags are None."""

    ranks: int | None
    tensor_parallel: int | None
    pipeline_parallel: int | None
    context_parallel: int | None
    expert_parallel: int | None
    distributed_optimizer: bool | None
    ray_address: str | None
    nodes: int | None
    gpus_per_node: int | None


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """The place where the ranks run: this process, Ray actors on CPUs, or Ray actors on GPUs.

    If `ray_address` is None, the worker starts Ray.
    """

    parallelism: Parallelism
    in_process: bool
    nodes: int
    gpus_per_node: int
    ray_address: str | None

    def described(self) -> dict[str, int | str]:
        """Return a text for the log: the number of ranks, the size of each dimension, and the place of the ranks."""
        layout = self.parallelism
        sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "context": layout.context, "data": layout.data}
        where = f"Ray at {self.ray_address}" if self.ray_address else "Ray in this container"
        hardware = {"gpus_per_node": self.gpus_per_node} if self.gpus_per_node else {}
        return {
            "ranks": layout.world_size,
            **sizes,
            "nodes": self.nodes,
            **hardware,
            "where": "this process" if self.in_process else where,
        }


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group(f"ranks of {' and '.join(ENGINES)}")
    flags.add_argument("--ranks", type=int, help="processes that hold the model; default 0: this process, on the CPU")
    flags.add_argument("--tensor-parallel", type=int, metavar="RANKS", help="number of ranks that share each matrix")
    flags.add_argument("--pipeline-parallel", type=int, metavar="RANKS", help="number of ranks that share the layers")
    flags.add_argument(
        "--context-parallel", type=int, metavar="RANKS", help="number of ranks that share a sequence; GPUs only"
    )
    flags.add_argument(
        "--expert-parallel", type=int, metavar="RANKS", help="number of ranks that share a mixture's experts"
    )
    flags.add_argument(
        "--distributed-optimizer",
        action="store_true",
        default=None,
        help="divide the optimizer state among the model's copies",
    )
    flags.add_argument(
        "--ray-address", metavar="HOST:PORT", help="address of a Ray cluster; default: start one in this container"
    )
    flags.add_argument("--nodes", type=int, help="number of machines, with equally many ranks each; default 1")
    flags.add_argument("--gpus-per-node", type=int, help="GPUs of each node, one rank each; default 0: ranks on CPUs")


def refused_rank_flags(engine: str, flags: RankFlags, *, sampling: bool) -> str | None:
    """Return why the flags cannot be combined, or None if they can be combined."""
    if engine not in ENGINES:
        names = [_flag(name) for name in RankFlags.__annotations__ if getattr(flags, name) is not None]
        return f"{', '.join(names)}: only {' and '.join(ENGINES)} have ranks, not {engine}" if names else None
    try:
        placement = rank_placement(engine, flags)
    except ValueError as error:
        return str(error)
    if placement.gpus_per_node and sampling:
        return "ranks on GPUs leave no memory for a sampler: give --no-sampling, and sample from another worker"
    return None


def rank_placement(engine: str, flags: RankFlags) -> RankPlacement:
    """Return the placement that the flags request.

    Raises ValueError for impossible combinations, with a message that names the flags.
    """
    nodes, gpus_per_node = _or(flags.nodes, 1), _or(flags.gpus_per_node, 0)
    if nodes < 1 or gpus_per_node < 0 or _or(flags.ranks, 0) < 0:
        raise ValueError("--nodes must be positive, --ranks and --gpus-per-node cannot be negative")
    _check_engine(engine, flags)
    if not gpus_per_node and _or(flags.context_parallel, 1) > 1:
        raise ValueError("--context-parallel needs GPUs: give --gpus-per-node")
    ranks = _ranks(flags, nodes, gpus_per_node)
    in_process = ranks == 0
    _check_division(flags, ranks)
    parallelism = Parallelism(
        world_size=max(1, ranks),
        tensor=_or(flags.tensor_parallel, 1),
        pipeline=_or(flags.pipeline_parallel, 1),
        context=_or(flags.context_parallel, 1),
        expert=_or(flags.expert_parallel, 1),
        distributed_optimizer=bool(flags.distributed_optimizer) or engine == MILES,  # whose Adam is always distributed
    )
    if in_process and (flags.ray_address is not None or nodes > 1):
        raise ValueError("--ray-address and --nodes need several ranks: give --ranks or --gpus-per-node")
    if parallelism.world_size % nodes:
        raise ValueError(f"--ranks {ranks} cannot be spread evenly over --nodes {nodes}: {_multiples(ranks, nodes)}")
    return RankPlacement(parallelism, in_process, nodes, gpus_per_node, flags.ray_address)


def _check_engine(engine: str, flags: RankFlags) -> None:
    """Refuse dimensions that an engine does not support."""
    if engine == MILES and _or(flags.context_parallel, 1) > 1:
        raise ValueError(f"--context-parallel is not supported by the engine {MILES}; use {NEMO_RL}")
    if engine == MILES and _or(flags.expert_parallel, 1) > 1:
        raise ValueError(f"--expert-parallel: the engine {MILES} does not train mixtures of experts; use {NEMO_RL}")


def rank_recompute(choice: Literal["auto"] | RankRecompute | None, *, on_gpus: bool) -> RankRecompute:
    """Resolve the value of `--recompute`.

    By default, whole layers are recomputed on GPUs, where memory is scarce, and nothing is recomputed on CPUs.
    """
    if choice is None or choice == "auto":
        return "layers" if on_gpus else "none"
    return choice


def _ranks(flags: RankFlags, nodes: int, gpus_per_node: int) -> int:
    """Return the number of ranks: one rank per GPU if the machine has GPUs."""
    gpus = nodes * gpus_per_node
    if gpus and flags.ranks not in (None, 0, gpus):
        raise ValueError(
            f"--ranks {flags.ranks} does not match --nodes {nodes} with --gpus-per-node {gpus_per_node}, which "
            f"have one rank per GPU: omit --ranks, or give {gpus}"
        )
    return gpus or _or(flags.ranks, 0)


def _check_division(flags: RankFlags, ranks: int) -> None:
    """Refuse numbers that do not divide each other, with a message that names the flags and a number that works."""
    counts = {name: _or(getattr(flags, name), 1) for name in DIVISIONS}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{_flag(name)} {count}: it must be at least 1")
    model_ranks = math.prod(counts.values())
    if model_ranks == 1 or (ranks and ranks % model_ranks == 0):
        return
    divides = " ".join(f"{_flag(name)} {count}" for name, count in counts.items() if count > 1)
    copy = f"{divides} divides a model among {model_ranks} ranks"
    if flags.gpus_per_node:
        raise ValueError(f"{copy}, and {ranks} GPUs cannot hold whole copies: the product must divide {ranks}")
    if not ranks:
        raise ValueError(f"{copy}, but without --ranks there is only the worker itself: give --ranks {model_ranks}")
    raise ValueError(f"{copy}, and --ranks {ranks} cannot hold whole copies: {_multiples(ranks, model_ranks)}")


def _multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"give --ranks {below} or {below + of}" if below else f"give --ranks {of}"


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
