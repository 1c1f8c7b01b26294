"""What may be chosen of engines on ranks, and the flags that say where their ranks are. Imports no framework."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Literal

from tinsmith_trainer.engines.batching import DEFAULT_TOKEN_BUDGET
from tinsmith_trainer.engines.megatron.parallelism import Parallelism

NEMO_RL = "nemo-rl"
MILES = "miles"
ENGINES = (NEMO_RL, MILES)
"""Those that have ranks."""
DIVISIONS = ("tensor_parallel", "pipeline_parallel", "context_parallel")
"""The flags whose product is how many ranks hold one copy of a model."""


RankRecompute = Literal["none", "mlp", "layers"]
"""What of each layer ranks compute again in backward, not to keep it till then: nothing, its feed-forward, or all."""


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """Limits in adapters, ranks of LoRA and tokens.

    Every adapter takes the memory of one of `max_rank` on all modules. `token_budget`: tokens of a microbatch on one
    data-parallel copy of the model; longer datums go alone. It decides how sums are rounded: changing it between
    a crash and its replay changes bits. `recompute` changes none.
    """

    adapter_slots: int = 64
    max_rank: int = 128
    token_budget: int = DEFAULT_TOKEN_BUDGET
    recompute: RankRecompute = "none"
    map_stable_reinforce: bool = True


class RankFlags(argparse.Namespace):
    """As they were given; None where they were not."""

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
class RanksWanted:
    """Where ranks run: in this process, as Ray actors on CPUs, or on GPUs. `ray_address` None: start Ray."""

    parallelism: Parallelism
    in_process: bool
    nodes: int
    gpus_per_node: int
    ray_address: str | None

    def described(self) -> dict[str, int | str]:
        """For a log: how many ranks, what each dimension has of them, and where they are."""
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
    flags.add_argument("--ranks", type=int, help="processes that hold the model; 0, the default: this one, on the CPU")
    flags.add_argument("--tensor-parallel", type=int, metavar="RANKS", help="ranks that share each matrix")
    flags.add_argument("--pipeline-parallel", type=int, metavar="RANKS", help="ranks that share the layers")
    flags.add_argument("--context-parallel", type=int, metavar="RANKS", help="ranks that share a sequence; GPUs only")
    flags.add_argument("--expert-parallel", type=int, metavar="RANKS", help="ranks that share a mixture's experts")
    flags.add_argument(
        "--distributed-optimizer",
        action="store_true",
        default=None,
        help="optimizer state divided among the model's copies",
    )
    flags.add_argument("--ray-address", metavar="HOST:PORT", help="a Ray cluster; default: one in this container")
    flags.add_argument("--nodes", type=int, help="machines that ranks are spread over evenly; default 1")
    flags.add_argument("--gpus-per-node", type=int, help="one rank each; 0, the default: ranks on CPUs")


def refused_rank_flags(engine: str, flags: RankFlags, *, sampling: bool) -> str | None:
    """Why these flags do not go together, or None."""
    if engine not in ENGINES:
        given = [_flag(name) for name in RankFlags.__annotations__ if getattr(flags, name) is not None]
        return f"{', '.join(given)}: only {' and '.join(ENGINES)} have ranks, not {engine}" if given else None
    try:
        wanted = ranks_wanted(engine, flags)
    except ValueError as error:
        return str(error)
    if wanted.gpus_per_node and sampling:
        return (
            "ranks on GPUs leave no room for a sampler beside them: give --no-sampling, and sample from another worker"
        )
    return None


def ranks_wanted(engine: str, flags: RankFlags) -> RanksWanted:
    """Raises ValueError with a sentence for what cannot be, in words of the flags."""
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
        distributed_optimizer=bool(flags.distributed_optimizer) or engine == MILES,  # which knows no other Adam
    )
    if in_process and (flags.ray_address is not None or nodes > 1):
        raise ValueError("--ray-address and --nodes are for several ranks: give --ranks or --gpus-per-node")
    if parallelism.world_size % nodes:
        raise ValueError(f"--ranks {ranks} cannot be spread evenly over --nodes {nodes}: {_multiples(ranks, nodes)}")
    return RanksWanted(parallelism, in_process, nodes, gpus_per_node, flags.ray_address)


def _check_engine(engine: str, flags: RankFlags) -> None:
    """What only one of the engines divides."""
    if engine == MILES and _or(flags.context_parallel, 1) > 1:
        raise ValueError(f"--context-parallel: the engine {MILES} has no ranks that share a sequence; {NEMO_RL} has")
    if engine == MILES and _or(flags.expert_parallel, 1) > 1:
        raise ValueError(f"--expert-parallel: the engine {MILES} trains no mixtures of experts; {NEMO_RL} does")


def rank_recompute(given: Literal["auto"] | RankRecompute | None, *, on_gpus: bool) -> RankRecompute:
    """What `--recompute` comes to; by itself layers on GPUs, whose memory is dear, and nothing on CPUs."""
    if given is None or given == "auto":
        return "layers" if on_gpus else "none"
    return given


def _ranks(flags: RankFlags, nodes: int, gpus_per_node: int) -> int:
    """One per GPU where there are GPUs."""
    gpus = nodes * gpus_per_node
    if gpus and flags.ranks not in (None, 0, gpus):
        raise ValueError(
            f"--ranks {flags.ranks} is not what --nodes {nodes} with --gpus-per-node {gpus_per_node} have, "
            f"one rank each: leave --ranks out, or give {gpus}"
        )
    return gpus or _or(flags.ranks, 0)


def _check_division(flags: RankFlags, ranks: int) -> None:
    """In words of the flags, with a number that works; `Parallelism` would refuse the same."""
    given = {name: _or(getattr(flags, name), 1) for name in DIVISIONS}
    for name, count in given.items():
        if count < 1:
            raise ValueError(f"{_flag(name)} {count}: it must be at least 1")
    model_ranks = math.prod(given.values())
    if model_ranks == 1 or (ranks and ranks % model_ranks == 0):
        return
    divides = " ".join(f"{_flag(name)} {count}" for name, count in given.items() if count > 1)
    copy = f"{divides} divides a model among {model_ranks} ranks"
    if flags.gpus_per_node:
        raise ValueError(f"{copy}, and {ranks} GPUs do not hold whole copies of it: give what divides {ranks}")
    if not ranks:
        raise ValueError(f"{copy}, and without --ranks there is one, the worker itself: give --ranks {model_ranks}")
    raise ValueError(f"{copy}, and --ranks {ranks} do not hold whole copies of it: {_multiples(ranks, model_ranks)}")


def _multiples(number: int, of: int) -> str:
    below = number // of * of
    return f"give --ranks {below} or {below + of}" if below else f"give --ranks {of}"


def _or(given: int | None, default: int) -> int:
    return default if given is None else given


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
