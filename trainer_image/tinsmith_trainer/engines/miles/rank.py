"""The class of the Ray actor that builds a rank of Tinsmith from Miles' Megatron actor.

The class contains an actor of Miles, and does not inherit from the actor's class. Only the constructor, `init`, `model`
and `optimizer` of Miles' actor are used. A driver can name this class without importing Miles.
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
        """Import Miles, which takes half a minute, and parse the arguments.

        Raises ServerError if Miles refuses the arguments.
        """
        from miles.backends.megatron_utils.actor import MegatronTrainRayActor

        from tinsmith_trainer.engines.miles.arguments import parsed

        self._actor_class = MegatronTrainRayActor
        self._args = parsed(self._arguments)

    @override
    def host(self) -> tuple[str, int]:
        """Return a free port, which the caller uses immediately.

        Miles would choose a port between 20000 and 21000, a range that other programs use, too.
        """
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    @override
    def join(self, address: str, port: int) -> None:
        """Build the rank.

        Raises ModelDirectoryInvalid, ServerError, and ValueError for a model whose optimizer steps are not supported.
        """
        self._rank = rank_of(self._made(address, port), self._parallelism, self._number)

    def _made(self, address: str, port: int) -> Any:
        """Create and start an actor, as `allocate_gpus_for_actor` (`miles/ray/train/actor_factory.py`) does."""
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
    """Build a rank from `actor`, after the call of `actor.init`. Miles' training methods are never called."""
    from tinsmith_trainer.engines.megatron.model.canonical_lora import adapted_rank
    from tinsmith_trainer.engines.megatron.model.schedule import MegatronSchedule
    from tinsmith_trainer.engines.megatron.step.unembedding import defer_unembedding

    if len(actor.model) != 1:
        raise ServerError(f"Miles built {len(actor.model)} model chunks on one rank; only one is supported.")
    (chunk,) = actor.model
    return adapted_rank(
        chunk, actor.optimizer, lambda: MegatronSchedule(chunk, defer_unembedding(chunk)), parallelism, number
    )


@contextmanager
def sums_in(bridge: type[Any]) -> Iterator[None]:
    """Inside the context, let `bridge` build models that sum gradients and support pipeline stages.

    `bridge` is Megatron-Bridge's AutoBridge. Megatron's data parallelism reads `calculate_per_token_loss` at
    construction, to choose between sums and means. Pipeline stages need the dtype of messages. Miles has flags for both
    settings, but the flags have no effect on a model with adapters. `_setup_lora_model_via_bridge`
    (`miles/backends/megatron_utils/bridge_lora_helpers.py`) passes only some settings to the bridge's provider, without
    these two settings.
    """
    stock = bridge.to_megatron_provider

    def with_sums(self: Any, *args: Any, **kwargs: Any) -> Any:
        provider = stock(self, *args, **kwargs)
        provider.calculate_per_token_loss = True
        provider.pipeline_dtype = provider.params_dtype
        return provider

    bridge.to_megatron_provider = with_sums
    try:
        yield
    finally:
        bridge.to_megatron_provider = stock
