"""A rank of a model, with the methods that the engine calls by name, on any machine.

Every rank receives every call, in the same order. Arguments and results are picklable. Tensor arguments are whole
tensors on the CPU, and each rank cuts out a part. Each rank returns a part, and the engine joins the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.engines.megatron.batch import Batch, RowResults
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.adapter_route import AdapterRoute
from tinsmith_trainer.engines.megatron.step.shared_calls import Loss, RankCall, SharedLoss, shares_of
from tinsmith_trainer.engines.megatron.step.tensor_parts import TensorPart, Tensors, cut
from tinsmith_trainer.engines.megatron.step.train_step import AdapterStep, StepState


class Schedule(Protocol):
    def __call__(
        self, microbatches: Sequence[Batch], loss: Loss, *, forward_only: bool, packed: bool = False
    ) -> list[RowResults]:
        """Return the results on the last pipeline stage, and an empty list on earlier stages.

        Microbatches may differ in shape. `packed`: the model computes the rows without the padding between them.
        """


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """The adapters' place in a model: the parts of an adapter's tensors, and the setter of alpha / rank.

    `route` gives the rows of a microbatch other adapters than the current one.
    """

    parts: tuple[TensorPart, ...]
    set_scale: Callable[[float], None]
    route: AdapterRoute


class Rank:
    """A rank of a model. The engine calls the methods that begin with `ts_`."""

    def __init__(
        self, step: AdapterStep, schedule: Schedule, places: LoraTarget, parallelism: Parallelism, rank: int
    ) -> None:
        self._step = step
        self._schedule = schedule
        self._places = places
        self._at = parallelism.coordinates(rank)
        self._returns_state = parallelism.is_first_copy(rank) or parallelism.is_first_of_experts(rank)
        self._scales: dict[str, float] = {}
        self._gradients: dict[int, Tensor] = {}  # by call, until they are added or dropped

    def ts_parts(self) -> tuple[TensorPart, ...]:
        """Return the parts that this rank holds of every adapter."""
        return self._places.parts

    def ts_create(self, adapter_id: str, scale: float, weights: Tensors) -> None:
        """Create an adapter. `weights` are whole tensors; `scale` is alpha / rank."""
        self._step.create(adapter_id, self._cut(weights))
        self._scales[adapter_id] = scale

    def ts_forward_backward(
        self, shard: Sequence[Batch], calls: Sequence[RankCall], kept: Collection[int]
    ) -> list[RowResults]:
        """Return the results of all rows on the last pipeline stage, and an empty list on earlier stages.

        The calls share their forwards, and no adapter changes. The ranks hold the gradients of each call. Gradients of
        earlier calls whose number is not in `kept` are dropped.
        """
        self._gradients = {number: held for number, held in self._gradients.items() if number in kept}
        return self._alone(shard, calls[0]) if len(calls) == 1 else self._together(shard, calls)

    def _alone(self, shard: Sequence[Batch], call: RankCall) -> list[RowResults]:
        self._places.set_scale(self._scales[call.adapter_id])

        def run() -> list[RowResults]:
            return self._schedule(shard, call.loss, forward_only=call.forward_only, packed=call.packed)

        if call.forward_only:
            return self._step.forward_only(call.adapter_id, run)
        results, self._gradients[call.number] = self._step.backward(call.adapter_id, run)
        return results

    def _together(self, shard: Sequence[Batch], calls: Sequence[RankCall]) -> list[RowResults]:
        route, forward_only, packed = self._places.route, calls[0].forward_only, calls[0].packed
        scales = [self._scales[call.adapter_id] for call in calls]

        def run(tensors: Sequence[Tensors]) -> list[RowResults]:
            shares = [shares_of(batch, calls, tensors, scales) for batch in shard]
            with route.through(self._step.chunk, shares):
                return self._schedule(shard, SharedLoss(calls, route), forward_only=forward_only, packed=packed)

        adapters = [call.adapter_id for call in calls]
        if forward_only:
            return self._step.shared_forward(adapters, run)
        results, gradients = self._step.shared_backward(adapters, run)
        self._gradients |= {call.number: own for call, own in zip(calls, gradients, strict=True)}
        return results

    def ts_add_gradients(self, adapter_id: str, number: int) -> None:
        """Add the gradients of the call with this number to the adapter's accumulator."""
        self._step.add(adapter_id, self._gradients.pop(number))

    def ts_optim_step(self, adapter_id: str, params: AdamParams) -> float:
        """Step the optimizer, and return the gradient's norm over all ranks before clipping.

        Raises UserError if the norm is not finite.
        """
        return self._step.optim_step(adapter_id, params)

    def ts_clear_gradients(self, adapter_id: str) -> None:
        self._step.clear_gradients(adapter_id)

    def ts_state(self, adapter_id: str) -> StepState | None:
        """Return this rank's parts, or None if other ranks report the same parts."""
        state = self._step.read(adapter_id)
        return state if self._returns_state else None

    def ts_load_state(self, adapter_id: str, scale: float, state: StepState) -> None:
        """Replace the adapter by a state, which has whole tensors."""
        groups = {name: self._cut(tensors) for name, tensors in state.groups.items()}
        self._step.write(adapter_id, replace(state, groups=groups))
        self._scales[adapter_id] = scale

    def ts_drop(self, adapter_id: str) -> None:
        """Drop an adapter. Unknown ids are ignored."""
        self._step.drop(adapter_id)
        self._scales.pop(adapter_id, None)

    def _cut(self, whole: Tensors) -> dict[str, Tensor]:
        return cut(whole, self._places.parts, self._at)
