"""One of our ranks, made of what Miles' Megatron actor builds; the class that is Ray's actor.

It has an actor of Miles and is none: of that one no more than its constructor, `init`, `model` and `optimizer` is used,
and so this class can be named by a driver that never imports Miles.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.ray_ranks import RankProcess
from tinsmith_trainer.engines.megatron.step.rank import Rank
from tinsmith_trainer.errors import ServerError

ROLE = "actor"


class MilesRank(RankProcess):
    def __init__(self, arguments: Sequence[str], parallelism: Parallelism, rank: int) -> None:
        self._arguments = arguments
        self._parallelism = parallelism
        self._number = rank

    @override
    def prepare(self) -> None:
        """Imports Miles, which takes half a minute, and parses. Raises ServerError for what Miles refuses."""
        from miles.backends.megatron_utils.actor import MegatronTrainRayActor

        from tinsmith_trainer.engines.miles.arguments import parsed

        self._actor_class = MegatronTrainRayActor
        self._args = parsed(self._arguments)

    @override
    def host(self) -> tuple[str, int]:
        """A port that is free now and taken at once. Miles would draw one between 20000 and 21000, as others do."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    @override
    def join(self, address: str, port: int) -> None:
        """Raises ModelDirectoryInvalid, ServerError, and ValueError for a model that our steps cannot be made on."""
        self._rank = rank_of(self._made(address, port), self._parallelism, self._number)

    def _made(self, address: str, port: int) -> Any:
        """As `allocate_gpus_for_actor` (`miles/ray/train/actor_factory.py`) and its group make and start one."""
        from megatron.bridge import AutoBridge
        from miles.utils.ft_utils.indep_dp import IndepDPInfo

        actor = self._actor_class(
            self._args,
            world_size=self._parallelism.world_size,
            rank=self._number,
            master_addr=address,
            master_port=port,
            indep_dp_store_addr=None,
            role=ROLE,
            cell_index=0,
        )
        with sums_in(AutoBridge):
            actor.init(self._args, ROLE, indep_dp_info=IndepDPInfo.create_trivial())
        return actor


def rank_of(actor: Any, parallelism: Parallelism, number: int) -> Rank:
    """`actor` after its `init`. Miles' methods for training are never called: neither its loss nor its scheduler."""
    from tinsmith_trainer.engines.megatron.model.canonical_lora import adapted_rank
    from tinsmith_trainer.engines.megatron.model.schedule import MegatronSchedule

    if len(actor.model) != 1:
        raise ServerError(f"Miles built {len(actor.model)} pieces of the model on one rank; a rank of ours has one.")
    (chunk,) = actor.model
    return adapted_rank(
        chunk, actor.optimizer, lambda: MegatronSchedule(chunk, **_precision(chunk)), parallelism, number
    )


@contextmanager
def sums_in(bridge: type[Any]) -> Iterator[None]:
    """Models built inside by `bridge`, Megatron-Bridge's AutoBridge, add gradients up, and have stages.

    Megatron's data parallelism reads `calculate_per_token_loss` when it is made, to know whether gradients are sums or
    means, and stages need to know the type of what they send each other. Miles has flags for both that do not reach a
    model with adapters: `_setup_lora_model_via_bridge` (`miles/backends/megatron_utils/bridge_lora_helpers.py`) hands
    on to the bridge's provider what it names one by one, and these are not among it.
    """
    stock = bridge.to_megatron_provider

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        provider = stock(self, *args, **kwargs)
        provider.calculate_per_token_loss = True
        provider.pipeline_dtype = provider.params_dtype
        return provider

    bridge.to_megatron_provider = told
    try:
        yield
    finally:
        bridge.to_megatron_provider = stock


def _precision(chunk: Any) -> dict[str, bool]:
    """A model in half precision would give its hidden states in float32, which its output layer then refuses."""
    from megatron.core.transformer.module import Float16Module

    return {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}
