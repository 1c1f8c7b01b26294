"""A tiny Megatron model on each rank of a layout, and small training programs that all ranks play on it.

What is said here is said of the whole model: batches are shared out over data ranks, adapters cut for tensor ranks,
and what ranks read is joined again, so that one program can be compared between layouts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from support.nemo_rl.gloo import GlooRanks
from support.nemo_rl.joined_states import Groups, Joined, Played
from tinsmith_trainer.engines.base import AdamParams
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.step.train_step import AdapterStep, StepState
from tinsmith_trainer.errors import UserError
from torch import Tensor

MAX_RANK, SCALE, VOCAB_SIZE = 8, 2.0, 128


@dataclass(frozen=True, slots=True)
class Layout:
    """`dtype` is that of the adapter's parameters."""

    parallelism: Parallelism
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Rows:
    """A call's data for all data ranks: int64 tokens and targets, float32 weights of any sign, all `[rows, length]`."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor


def rows(count: int, seed: int, *, scale: float = 1.0) -> Rows:
    """Weights of either sign."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB_SIZE, (2, count, 6), generator=generator)
    return Rows(tokens, targets, torch.randn(count, 6, generator=generator) * scale)


@dataclass(frozen=True, slots=True)
class Create:
    """An adapter of this rank, padded with zeros to `MAX_RANK`. B is not zero, so that A moves from the first step."""

    adapter: str
    rank: int = MAX_RANK


@dataclass(frozen=True, slots=True)
class Backward:
    """One call whose gradients are accumulated: the schedule runs once for each of `calls`.

    Where `fails_in` is set, that microbatch of the first one raises; where `fails_after`, the run after so many.
    """

    adapter: str
    calls: tuple[Rows, ...]
    fails_in: int | None = None
    fails_after: int | None = None


@dataclass(frozen=True, slots=True)
class Forward:
    adapter: str
    call: Rows


@dataclass(frozen=True, slots=True)
class Step:
    """A step. Where `refused` is set, it must raise a UserError that matches."""

    adapter: str
    params: AdamParams = field(default_factory=lambda: AdamParams(1e-2, weight_decay=0.1))
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class Read:
    adapter: str


@dataclass(frozen=True, slots=True)
class Reload:
    """Reads, drops, and writes back what was read."""

    adapter: str


@dataclass(frozen=True, slots=True)
class Write:
    """Joined groups, as another layout read them."""

    adapter: str
    step: int
    groups: Groups


Event = Create | Backward | Forward | Step | Read | Reload | Write


@dataclass(frozen=True, slots=True)
class Shard:
    """A tensor of one rank: which dimension tensor ranks divide, and where this one stands."""

    group: str
    name: str
    values: Tensor
    split: int | None
    tensor_rank: int


RankRead = tuple[int, list[Shard]]


class LayoutRanks(AbstractContextManager["LayoutRanks"]):
    """The ranks of a layout with a model on them."""

    def __init__(self, layout: Layout, directory: Path) -> None:
        self._ranks = GlooRanks(layout.parallelism.world_size)
        try:
            self._ranks.run(_open, layout, directory)
        except BaseException:
            self._ranks.close()
            raise

    def play(self, *program: Event) -> Played:
        """Run the events, starting without adapters.

        Ranks must report the same norms, and copies of the model the same bits.
        """
        by_rank = self._ranks.run(_play, program)
        norms = [norms for norms, _ in by_rank]
        assert all(own == norms[0] for own in norms), norms
        reads = zip(*(reads for _, reads in by_rank), strict=True)
        return Played(norms[0], [_join(parts) for parts in reads])

    def ask(self, question: Callable[[Rig], Any]) -> list[Any]:
        """Return each rank's answer. `question` is a function of a module that ranks can import."""
        return self._ranks.run(_ask, question)

    def __exit__(self, *_: object) -> None:
        self._ranks.close()


def _join(parts: Sequence[RankRead]) -> Joined:
    assert len({step for step, _ in parts}) == 1
    groups: dict[str, dict[str, Tensor]] = {}
    shards: dict[tuple[str, str], dict[int, Shard]] = {}
    for shard in (shard for _, of_rank in parts for shard in of_rank):
        of_tensor = shards.setdefault((shard.group, shard.name), {})
        twin = of_tensor.setdefault(0 if shard.split is None else shard.tensor_rank, shard)
        assert torch.equal(twin.values, shard.values), f"ranks differ in {shard.group}/{shard.name}"
    for (group, name), of_tensor in shards.items():
        ordered = [of_tensor[index].values for index in sorted(of_tensor)]
        split = of_tensor[0].split
        groups.setdefault(group, {})[name] = ordered[0] if split is None else torch.cat(ordered, split)
    return Joined(parts[0][0], groups)


@dataclass(slots=True)
class Rig:
    """The state of a rank between calls."""

    parallelism: Parallelism
    ddp: Any
    step: AdapterStep
    tensors: Sequence[Any]
    set_scale: Callable[[float], None]

    @property
    def at(self) -> Any:
        return self.parallelism.coordinates(torch.distributed.get_rank())

    def cut(self, name: str, whole: Tensor, split: int | None) -> Tensor:
        return whole if split is None else whole.chunk(self.parallelism.tensor, split)[self.at.tensor].clone()

    def share(self, call: Rows) -> Iterator[Rows]:
        """Return this data rank's rows, one for each microbatch, filled up with rows of weight 0."""
        data = self.parallelism.data
        missing = -len(call.tokens) % data
        filled = Rows(*(torch.cat([of, torch.zeros(missing, of.shape[1], dtype=of.dtype)]) for of in _fields(call)))
        own = len(filled.tokens) // data
        for row in range(self.at.data * own, (self.at.data + 1) * own):
            yield Rows(*(of[row : row + 1] for of in _fields(filled)))


_rig: Rig | None = None


def _fields(call: Rows) -> tuple[Tensor, Tensor, Tensor]:
    return call.tokens, call.targets, call.weights


def _open(layout: Layout, directory: Path) -> None:
    from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
    from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model, initialise_parallel
    from tinsmith_trainer.engines.megatron.step.optimizer import wrap_for_training

    global _rig  # noqa: PLW0603
    parallelism = layout.parallelism
    initialise_parallel(parallelism, torch.distributed.get_rank())
    model = build_megatron_model(directory, parallelism, max_rank=MAX_RANK)
    for tensor in model.lora.tensors:
        tensor.parameter.data = tensor.parameter.data.to(layout.dtype)
    with cpu_megatron():
        ddp, optimizer = wrap_for_training(model.chunk, distributed_optimizer=parallelism.distributed_optimizer)
        step = AdapterStep(ddp, optimizer, model.lora.tensors)
    _rig = Rig(parallelism, ddp, step, model.lora.tensors, model.lora.set_scale)


def _ask(question: Callable[[Rig], Any]) -> Any:
    from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron

    assert _rig is not None
    with cpu_megatron():
        return question(_rig)


def _play(program: Sequence[Event]) -> tuple[list[float], list[RankRead]]:
    return _ask(partial(_play_on, program=program))


def _play_on(rig: Rig, program: Sequence[Event]) -> tuple[list[float], list[RankRead]]:
    norms: list[float] = []
    reads: list[RankRead] = []
    for adapter in {event.adapter for event in program}:
        rig.step.drop(adapter)
    for event in program:
        match event:
            case Create(adapter, rank):
                rig.step.create(adapter, {one.name: _initial(rig, one, adapter, rank) for one in rig.tensors})
            case Backward():
                _accumulate(rig, event)
            case Forward(adapter, call):
                rig.step.forward_only(adapter, lambda call=call: run_schedule(rig, call, forward_only=True))
            case Step(adapter, params, None):
                norms.append(rig.step.optim_step(adapter, params))
            case Step(adapter, params, str(refused)):
                with pytest.raises(UserError, match=refused):
                    rig.step.optim_step(adapter, params)
            case Read(adapter):
                reads.append(_shards(rig, rig.step.read(adapter)))
            case Reload(adapter):
                state = rig.step.read(adapter)
                rig.step.drop(adapter)
                rig.step.write(adapter, state)
            case Write(adapter, step, groups):
                rig.step.write(adapter, StepState(step, {name: _cut(rig, of) for name, of in groups.items()}))
    return norms, reads


class BrokenMicrobatch(Exception):
    """The error of a failing Backward."""


def accumulate(rig: Rig, adapter: str, run: Callable[[], Any]) -> None:
    _, gradients = rig.step.backward(adapter, run)
    rig.step.add(adapter, gradients)


def _accumulate(rig: Rig, event: Backward) -> None:
    def run() -> None:
        for number, call in enumerate(event.calls):
            if number == event.fails_after:
                raise BrokenMicrobatch
            run_schedule(rig, call, fails_in=event.fails_in)

    fails = event.fails_in is not None or event.fails_after is not None
    with pytest.raises(BrokenMicrobatch) if fails else nullcontext():
        accumulate(rig, event.adapter, run)


def run_schedule(rig: Rig, call: Rows, *, forward_only: bool = False, fails_in: int | None = None) -> list[Tensor]:
    """Megatron's schedule over this rank's rows; the last stage's logprobs by microbatch."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from tinsmith_trainer.engines.megatron.step.unembedding import target_logprobs

    rig.set_scale(SCALE)
    logprobs: list[Tensor] = []
    microbatches = list(rig.share(call))

    def loss_of(logits: Tensor, one: Rows) -> tuple[Tensor, Tensor, dict[str, Any]]:
        logprobs.append(target_logprobs(logits, one.targets))
        return -(logprobs[-1] * one.weights).sum(), torch.tensor(0), {}

    def forward(batches: Iterator[tuple[int, Rows]], chunk: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        index, one = next(batches)
        if index == fails_in:
            raise BrokenMicrobatch
        positions = torch.arange(one.tokens.shape[1]).expand_as(one.tokens)
        return chunk(one.tokens, positions, None), partial(loss_of, one=one)

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(enumerate(microbatches)),
        model=[rig.ddp],
        num_microbatches=len(microbatches),
        seq_length=call.tokens.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return logprobs


def _initial(rig: Rig, tensor: Any, adapter: str, rank: int) -> Tensor:
    """Drawn by the adapter's and the tensor's name."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{adapter}/{tensor.name}".encode()))
    whole = torch.randn(tensor.full_shape, generator=generator) * 0.1
    if tensor.name.endswith("lora_A"):
        whole[rank:] = 0
    else:
        whole[:, rank:] = 0
    return rig.cut(tensor.name, whole, tensor.split)


def _cut(rig: Rig, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {one.name: rig.cut(one.name, whole[one.name], one.split) for one in rig.tensors}


def _shards(rig: Rig, state: StepState) -> RankRead:
    splits = {one.name: one.split for one in rig.tensors}
    return state.step, [
        Shard(group, name, values, splits[name], rig.at.tensor)
        for group, tensors in state.groups.items()
        for name, values in tensors.items()
    ]
