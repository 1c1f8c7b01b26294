"""Calls in progress on the PEFT engine: their remaining microbatches, and which of them can share a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from typing_extensions import override

from tinsmith_trainer.engines.base import Call, Datum, Outcome, Work
from tinsmith_trainer.engines.batching import Microbatch, MicrobatchShape, pad
from tinsmith_trainer.engines.losses import DatumResult, PreparedLoss, outcome_of
from tinsmith_trainer.engines.peft.adapter import Adapter
from tinsmith_trainer.engines.peft.share_losses import ShareResult
from tinsmith_trainer.engines.peft.shares import Share
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.vision import Vision


@dataclass(frozen=True, slots=True)
class _GroupKey:
    """The key of microbatches that may share a forward, for adapters of any rank and modules.

    `length` is the padded length of rows; packed microbatches may have any length.
    """

    product_tokens: int
    length: int | None
    trains: bool


@dataclass(slots=True, eq=False)
class PeftCall(Call):
    """A call whose gradients add up in `scratch`. `finish` passes them to the adapter."""

    work: Work
    adapter: Adapter
    loss: PreparedLoss
    plan: Sequence[Microbatch]
    scratch: Tensor | None = None
    computed: int = 0
    results: dict[int, DatumResult] = field(default_factory=dict)  # by datum
    error: TrainerError | None = None
    runs_alone: bool = False  # since the failure of a shared forward

    @property
    def is_alone(self) -> bool:
        """True if the next forward runs alone.

        A custom loss always does, so that other calls do not wait for user code.
        """
        return self.runs_alone or self.loss.program is not None or (self.next_tokens > 0 and self.shape.has_images)

    @property
    @override
    def next_tokens(self) -> int:
        if self.error is not None or self.computed == len(self.plan):
            return 0
        return self.shape.tokens

    @property
    def shape(self) -> MicrobatchShape:
        """The shape of the next microbatch."""
        return self.plan[self.computed].shape

    def key(self) -> _GroupKey:
        shape = self.shape
        length = None if shape.packed else shape.width
        return _GroupKey(shape.product_tokens, length, trains=not self.work.forward_only)

    def share(self, vision: Vision | None) -> Share:
        """Build the next microbatch's part of a forward. Raises UserError for a damaged image."""
        if self.scratch is None and not self.work.forward_only:
            self.scratch = torch.zeros_like(self.adapter.weights.data)
        arrays = pad(self.plan[self.computed], self.work.datums, self.loss.arrays)
        return Share(self.adapter, self.shape, arrays, self.loss, self.scratch, self._image_inputs(vision))

    def _image_inputs(self, vision: Vision | None) -> Mapping[str, Tensor] | None:
        if vision is None or not self.shape.has_images:
            return None
        [index] = self.plan[self.computed].datum_indices
        datum = self.work.datums[index]
        return vision.inputs(f"Datum {index}", datum.tokens, datum.images)

    def take(self, result: ShareResult) -> None:
        """Record the result of a microbatch."""
        for row, index in enumerate(self.plan[self.computed].datum_indices):
            length = self.work.datums[index].length
            metrics = {name: float(values[row]) for name, values in result.metrics.items()}
            self.results[index] = DatumResult(result.logprobs[row, :length].copy(), float(result.losses[row]), metrics)
        self.computed += 1

    def restart_alone(self) -> None:
        """Restart after the failure of a shared forward, which another call may have caused.

        The backward may have added part of a gradient, so `scratch` is cleared.
        """
        self.runs_alone, self.computed = True, 0
        self.results.clear()
        if self.scratch is not None:
            self.scratch.zero_()

    def finish(self) -> Outcome:
        if self.error is not None:
            raise self.error
        outcome = outcome_of(self.work, self.loss, [self.results[index] for index in range(len(self.work.datums))])
        if self.scratch is not None:
            self.adapter.accumulate(self.scratch)
        return outcome


def select_cobatch(calls: Sequence[PeftCall], cobatch_tokens: int) -> list[PeftCall]:
    """Return the first call, and those whose next microbatch fits into its forward of `cobatch_tokens`."""
    first = calls[0]
    if first.is_alone:
        return [first]
    group, room = [first], cobatch_tokens - first.next_tokens
    for call in calls[1:]:
        if not call.is_alone and call.next_tokens <= room and call.key() == first.key():
            group.append(call)
            room -= call.next_tokens
    return group


def with_placed_images(torch_model: TorchModel, work: Work) -> Work:
    """Return the work with the model's image tokens among the text tokens. Raises UserError."""
    if not any(datum.images for datum in work.datums):
        return work
    placed = [_with_placed_images(torch_model, index, datum) for index, datum in enumerate(work.datums)]
    return replace(work, datums=placed)


def _with_placed_images(torch_model: TorchModel, index: int, datum: Datum) -> Datum:
    if not datum.images:
        return datum
    assert torch_model.vision is not None, "capabilities() excludes images"
    return replace(datum, tokens=torch_model.vision.placed(f"Datum {index}", datum.tokens, datum.images))
