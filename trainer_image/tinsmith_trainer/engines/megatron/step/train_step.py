"""The split train step on one rank: gradients of several calls, then one AdamW step. One model has many adapters.

Each call of `backward` sums gradients over data-parallel ranks, in buffers that start at zero, and returns the sums.
`add` adds them to the adapter's accumulator after the whole call succeeded. So every rank has the whole accumulator,
which does not depend on how datums are distributed. No gradient is summed twice, and a failed call has no effect.

A forward that several calls share uses copies of their adapters. The gradients of each adapter are then summed over
the ranks one after the other, in the same buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from tinsmith_trainer.engines.adapters import EXP_AVG, EXP_AVG_SQ, GRADIENTS, WEIGHTS, check_adam, check_norm
from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.engines.megatron.rank_group import RanksLost
from tinsmith_trainer.engines.megatron.step.adapter_slots import (
    AdapterSlot,
    LentAdapter,
    Parked,
    pack,
    split,
    to_host,
    unpack,
)
from tinsmith_trainer.engines.megatron.step.optimizer import OptimizerState, check_setup
from tinsmith_trainer.engines.megatron.step.tensor_parts import Tensors
from tinsmith_trainer.errors import ServerError

T = TypeVar("T")


class TrainableTensor(Protocol):
    """A matrix of the adapter in the model: this rank's shard, padded to the largest rank."""

    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> torch.nn.Parameter: ...


@dataclass(frozen=True, slots=True)
class StepState:
    """The complete state of an adapter on one rank, on the host. Picklable.

    `groups` holds the groups of `engines.adapters`: weights (float32 masters), Adam's moments, and gradients. A group
    maps tensor names to tensors. The tensors of a group are shards of tensor and pipeline parallelism, and the same on
    all data-parallel ranks. A group may be absent: the moments before the first step, and the gradients directly after
    a step.
    """

    step: int
    groups: Mapping[str, Mapping[str, Tensor]]


class AdapterStep:
    """The adapters on one rank's part of a model.

    One adapter at a time is in the model; all other adapters wait on the host.

    `ddp` is Megatron's DistributedDataParallel around the part, `optimizer` is Megatron's optimizer, and `tensors` are
    all parameters of the optimizer. Every rank must make the same calls in the same order, because most calls
    communicate. Raises ValueError for a model or an optimizer that computes averages of gradients, not sums.
    """

    def __init__(self, ddp: Any, optimizer: Any, tensors: Sequence[TrainableTensor]) -> None:
        check_setup(ddp, optimizer, [tensor.parameter for tensor in tensors])
        self._ddp = ddp
        self._optimizer = optimizer
        self._names = [tensor.name for tensor in tensors]
        self._parameters = [tensor.parameter for tensor in tensors]
        self._state = OptimizerState(optimizer, self._parameters)
        self._has_masters = self._parameters[0].dtype != torch.float32
        self._slots: dict[str, AdapterSlot] = {}
        self._inside: str | None = None

    def create(self, adapter_id: str, weights: Mapping[str, Tensor]) -> None:
        """Create or replace an adapter, with a new optimizer."""
        self.write(adapter_id, StepState(0, {WEIGHTS: weights}))

    @property
    def chunk(self) -> torch.nn.Module:
        """The rank's part of the model, which a schedule calls once for each microbatch."""
        chunk: torch.nn.Module = self._ddp
        return chunk

    def backward(self, adapter_id: str, run: Callable[[], T]) -> tuple[T, Tensor]:
        """Return the result of `run`, and the flat sum of the gradients of its forwards and backwards."""
        self._switch(adapter_id)
        self._ddp.train()
        self._ddp.zero_grad_buffer()
        try:
            with _without_hooks(self._ddp.config):
                result = run()
            self._reduce()
            return result, pack(self._buffers())
        finally:
            self._state.forget_gradients()

    def forward_only(self, adapter_id: str, run: Callable[[], T]) -> T:
        """Call `run` without gradients, but in training mode, so that the outputs are the same as in `backward`."""
        self._switch(adapter_id)
        self._ddp.train()
        with torch.no_grad():
            return run()

    def shared_backward(
        self, adapter_ids: Sequence[str], run: Callable[[Sequence[Tensors]], T]
    ) -> tuple[T, list[Tensor]]:
        """Call `run` with the tensors of these adapters. Return its result, and each adapter's flat gradients."""
        lent = [self._lent(adapter_id, trains=True) for adapter_id in adapter_ids]
        self._ddp.train()
        with _without_hooks(self._ddp.config):
            result = run([adapter.tensors for adapter in lent])
        return result, [self._reduced(adapter) for adapter in lent]

    def shared_forward(self, adapter_ids: Sequence[str], run: Callable[[Sequence[Tensors]], T]) -> T:
        """Call `run` with the tensors of these adapters, without gradients."""
        self._ddp.train()
        with torch.no_grad():
            return run([self._lent(adapter_id, trains=False).tensors for adapter_id in adapter_ids])

    def add(self, adapter_id: str, gradients: Tensor) -> None:
        """Add the flat gradients of a successful call to the accumulator, which takes ownership of the tensor."""
        slot = self._slot(adapter_id)
        slot.add(gradients if slot.parked is None else to_host(gradients))

    def _lent(self, adapter_id: str, *, trains: bool) -> LentAdapter:
        slot = self._slot(adapter_id)
        device = self._parameters[0].device
        weights = pack(self._parameters) if slot.parked is None else slot.parked.model.to(device, non_blocking=True)
        return LentAdapter(weights, self._names, self._parameters, trains=trains)

    def _reduced(self, adapter: LentAdapter) -> Tensor:
        """Return an adapter's gradients, summed over all ranks over which Megatron sums them."""
        assert adapter.gradients is not None
        self._ddp.zero_grad_buffer()
        unpack(adapter.gradients, self._buffers())
        try:
            self._reduce()
            return pack(self._buffers())
        finally:
            self._state.forget_gradients()

    def optim_step(self, adapter_id: str, params: AdamParams) -> float:
        """Clip the gradient, step AdamW, and clear the accumulator. Return the norm over all ranks before clipping.

        Raises UserError for hyperparameters out of range, and for a norm that is not finite; weights and optimizer then
        stay unchanged. A norm that is not finite also clears the accumulator. Raises RanksLost if the step itself
        failed.
        """
        check_adam(params)
        slot = self._switch(adapter_id)
        self._offer(slot.take_gradients())
        try:
            self._optimizer.prepare_grads()
            norm = float(self._optimizer.get_grad_norm())
            check_norm(norm)
            self._apply(params, norm)
        finally:
            self._state.forget_gradients()
        slot.step += 1
        slot.has_moments = True
        return norm

    def clear_gradients(self, adapter_id: str) -> None:
        self._slot(adapter_id).gradients = None

    def drop(self, adapter_id: str) -> None:
        """Drop an adapter. Unknown ids are ignored."""
        self._slots.pop(adapter_id, None)
        if self._inside == adapter_id:
            self._inside = None

    def read(self, adapter_id: str) -> StepState:
        """Return a copy of an adapter's state.

        With the distributed optimizer, data-parallel ranks must call this together.
        """
        slot = self._slot(adapter_id)
        parked = slot.parked or self._park(slot)
        weights = parked.model if parked.masters is None else self._state.whole(parked.masters)
        groups = {WEIGHTS: weights}
        if parked.moments is not None:
            first, second = parked.moments
            groups |= {EXP_AVG: self._state.whole(first), EXP_AVG_SQ: self._state.whole(second)}
        if slot.gradients is not None:
            groups[GRADIENTS] = slot.gradients
        return StepState(slot.step, {group: self._named(flat) for group, flat in groups.items()})

    def write(self, adapter_id: str, state: StepState) -> None:
        """Set the state of a new or existing adapter, without communication."""
        flat = {group: self._flat(group, tensors) for group, tensors in state.groups.items()}
        weights = flat[WEIGHTS]
        moments = None
        if EXP_AVG in flat:
            moments = self._state.shards(flat[EXP_AVG]), self._state.shards(flat[EXP_AVG_SQ])
        masters = self._state.shards(weights) if self._has_masters else None
        parked = Parked(weights.to(self._parameters[0].dtype), masters, moments)
        self.drop(adapter_id)
        self._slots[adapter_id] = AdapterSlot(state.step, moments is not None, flat.get(GRADIENTS), parked)

    def _slot(self, adapter_id: str) -> AdapterSlot:
        try:
            return self._slots[adapter_id]
        except KeyError:
            raise ServerError(f"Adapter {adapter_id} is not loaded in this worker.") from None

    def _switch(self, adapter_id: str) -> AdapterSlot:
        """Move the current adapter out of the model, then move another adapter into the model."""
        slot = self._slot(adapter_id)
        if slot.parked is None:
            return slot
        if self._inside is not None:
            leaving = self._slots[self._inside]
            leaving.parked = self._park(leaving)
            leaving.gradients = None if leaving.gradients is None else to_host(leaving.gradients)
        # No adapter is current until the other one is completely in the model, so an error here damages no adapter.
        self._inside = None
        self._bring_in(slot.step, slot.parked)
        slot.gradients = None if slot.gradients is None else slot.gradients.to(self._parameters[0].device)
        slot.parked = None
        self._inside = adapter_id
        return slot

    def _park(self, slot: AdapterSlot) -> Parked:
        """Return a host copy of the adapter's values in the model and the optimizer."""
        first_second = self._state.moments() if slot.has_moments else None
        return Parked(
            to_host(pack(self._parameters)),
            to_host(pack(self._state.masters())) if self._has_masters else None,
            None if first_second is None else (to_host(first_second[0]), to_host(first_second[1])),
        )

    def _bring_in(self, step: int, parked: Parked) -> None:
        unpack(parked.model, self._parameters)
        if parked.masters is not None:
            unpack(parked.masters, self._state.masters())
        self._state.set_moments(step, parked.moments)

    def _reduce(self) -> None:
        """Sum the gradients over data-parallel ranks, and over all other ranks that Megatron includes.

        Every rank gets the whole sum, although the distributed optimizer needs only a shard. LoRA's gradients are
        small, and a whole accumulator can be read, written and resharded without communication.
        """
        finalize = self._ddp.config.finalize_model_grads_func or _megatrons_finalize()
        finalize([self._ddp], None, force_all_reduce=True)

    def _offer(self, gradients: Tensor | None) -> None:
        """Copy an accumulator to the buffers from which the optimizer reads.

        An accumulator of None stands for zeros.
        """
        self._ddp.zero_grad_buffer()
        if gradients is not None:
            unpack(gradients, self._buffers())

    def _buffers(self) -> list[Tensor]:
        """Return the float32 buffers in which Megatron sums each parameter's gradient."""
        return [cast(Any, parameter).main_grad for parameter in self._parameters]

    def _apply(self, params: AdamParams, norm: float) -> None:
        try:
            self._state.set_hyperparameters(params)
            self._state.clip(norm, params.grad_clip_norm)
            self._optimizer.step_with_ready_grads()
        except Exception as error:
            raise RanksLost(f"A step failed after it began to change weights: {error}") from error

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        """Return copies of tensors by name, each copy with separate storage.

        A pickled view would contain the whole flat tensor.
        """
        parts = split(flat.cpu(), self._parameters)
        return {name: part.clone() for name, part in zip(self._names, parts, strict=True)}

    def _flat(self, group: str, tensors: Mapping[str, Tensor]) -> Tensor:
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if name not in tensors or tensors[name].shape != parameter.shape:
                has = list(tensors[name].shape) if name in tensors else "nothing"
                raise ServerError(f"Rank's {group}/{name} must have shape {list(parameter.shape)}, but got {has}.")
        if extra := tensors.keys() - set(self._names):
            raise ServerError(f"This rank does not train {min(extra)}, but got its {group}.")
        return pack([tensors[name].float() for name in self._names])


@contextlib.contextmanager
def _without_hooks(config: Any) -> Iterator[None]:
    """Prevent schedules from reducing gradients, so that one reduction follows the whole call."""
    names = ("finalize_model_grads_func", "grad_sync_func", "no_sync_func")
    before = {name: getattr(config, name) for name in names}
    config.finalize_model_grads_func = config.grad_sync_func = None
    config.no_sync_func = contextlib.nullcontext
    try:
        yield
    finally:
        for name, hook in before.items():
            setattr(config, name, hook)


def _megatrons_finalize() -> Callable[..., None]:
    from megatron.core.distributed import finalize_model_grads

    finalize: Callable[..., None] = finalize_model_grads
    return finalize
