"""One of our ranks, made of what Miles' Megatron actor builds; the class that is Ray's actor.

It has an actor of Miles and is none: of that one no more than its constructor, `init`, `model` and `optimizer` is used,
and so this class can be named by a driver that never imports Miles.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import structlog

from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.rank_group import Answer, attempt
from tinsmith_trainer.engines.megatron.step.rank import LoraPlaces, Rank

log = structlog.get_logger(__name__)

ROLE = "actor"


class MilesRank:
    """Built in steps, because the first rank must know its address before the others can come to it."""

    def __init__(self, arguments: Sequence[str], parallelism: Parallelism, rank: int) -> None:
        self._arguments = arguments
        self._parallelism = parallelism
        self._number = rank

    def host(self) -> tuple[str, int]:
        """Of the first rank: where all meet. Miles would draw a port between 20000 and 21000, as its neighbours do."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), free.getsockname()[1]

    def join(self, address: str, port: int) -> None:
        """Returns when all ranks have come and the model is built. Raises ServerError, ModelDirectoryInvalid, and
        ValueError for a model that steps of ours cannot be made on."""
        self._rank = rank_of(self._made(address, port), self._parallelism, self._number)

    def _made(self, address: str, port: int) -> Any:
        """As `allocate_gpus_for_actor` (`miles/ray/train/actor_factory.py`) and its group make and start one."""
        from megatron.bridge import AutoBridge
        from miles.backends.megatron_utils.actor import MegatronTrainRayActor
        from miles.utils.ft_utils.indep_dp import IndepDPInfo

        from tinsmith_trainer.engines.miles.arguments import parsed

        args = parsed(self._arguments)
        actor: Any = MegatronTrainRayActor(
            args,
            world_size=self._parallelism.world_size,
            rank=self._number,
            master_addr=address,
            master_port=port,
            indep_dp_store_addr=None,
            role=ROLE,
            cell_index=0,
        )
        with sums_in(AutoBridge):
            actor.init(args, ROLE, indep_dp_info=IndepDPInfo.create_trivial())
        return actor

    def ts_call(self, method: str, args: tuple[Any, ...]) -> Answer:
        """What came of `Rank`'s method of that name."""
        return attempt(lambda: getattr(self._rank, method)(*args))

    def ts_call_on_shard(self, method: str, shard: Any, args: tuple[Any, ...]) -> Answer:
        return self.ts_call(method, (shard, *args))


def rank_of(actor: Any, parallelism: Parallelism, number: int) -> Rank:
    """`actor` after its `init`. Miles' methods for training are never called: neither its loss nor its scheduler."""
    from tinsmith_trainer.engines.megatron.model.canonical_lora import find_lora
    from tinsmith_trainer.engines.megatron.model.schedule import MegatronSchedule
    from tinsmith_trainer.engines.megatron.step.train_step import AdapterStep

    [chunk] = actor.model
    # Its schedule reads this at every call: stages tell each other each microbatch's shape, and none is padded.
    chunk.config.variable_seq_lengths = parallelism.pipeline > 1
    lora = find_lora(chunk, tensor_ranks=parallelism.tensor)
    step = AdapterStep(chunk, actor.optimizer, lora.tensors)
    parts = tuple(tensor.part() for tensor in lora.tensors)
    log.info("a rank is ready", rank=number, tensors=len(parts))
    return Rank(
        step, MegatronSchedule(chunk, **_precision(chunk)), LoraPlaces(parts, lora.set_scale), parallelism, number
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
