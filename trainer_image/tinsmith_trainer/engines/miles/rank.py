"""One of our ranks, made of what Miles' Megatron actor builds; the class that is Ray's actor.

It has an actor of Miles and is none: of that one no more than its constructor, `init`, `model` and `optimizer` is used,
and so this class can be named by a driver that never imports Miles.
"""

from __future__ import annotations

import socket
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
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
        from miles.backends.megatron_utils import lora_utils
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
        with canonical_lora_in(lora_utils):
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
def canonical_lora_in(lora_utils: ModuleType) -> Iterator[None]:
    """Models built inside get our LoRA where `lora_utils`, Miles' module, says `create_lora_instance`.

    `_setup_lora_model_via_bridge` (`miles/backends/megatron_utils/bridge_lora_helpers.py`) imports it when called.
    """
    stock = lora_utils.create_lora_instance
    vars(lora_utils)["create_lora_instance"] = _created
    try:
        yield
    finally:
        vars(lora_utils)["create_lora_instance"] = stock


def _created(args: Namespace) -> SummedLora:
    from tinsmith_trainer.engines.megatron.model.canonical_lora import canonical_lora

    return SummedLora(canonical_lora(target_modules=args.target_modules, dim=args.lora_rank))


class SummedLora:
    """What Miles does with a LoRA: calls it with the model's chunks, before Megatron's data parallelism wraps them.

    That one reads `calculate_per_token_loss` when it is made, to know whether gradients are sums or means over
    data-parallel ranks. Miles has no way to say it to a model that Megatron-Bridge builds: its flag of that name is not
    among what is handed on.
    """

    def __init__(self, lora: Any) -> None:
        self._lora = lora

    def __call__(self, chunks: Sequence[Any], training: bool = True) -> Any:
        for chunk in chunks:
            chunk.config.calculate_per_token_loss = True
        return self._lora(chunks, training=training)

    def set_params_to_save(self, chunks: Sequence[Any]) -> None:
        self._lora.set_params_to_save(chunks)


def _precision(chunk: Any) -> dict[str, bool]:
    """A model in half precision would give its hidden states in float32, which its output layer then refuses."""
    from megatron.core.transformer.module import Float16Module

    return {"fp32_output": False} if isinstance(chunk.module, Float16Module) else {}
