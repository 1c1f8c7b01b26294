"""The losses of a forward's shares: shares with the same loss are computed by the same operations.

Where shares are joined, the number of launches and of copies between host and device depends on the number of different
losses, and not on the number of shares. A row's loss and metrics depend only on this row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.engines.batching import CELLS_PER_TOKEN
from tinsmith_trainer.engines.losses import VALID
from tinsmith_trainer.engines.peft.shares import Share


@dataclass(frozen=True, slots=True)
class ShareResult:
    """Results per row: logprobs `[rows, width]` or `[rows, width, K]`, loss and metrics `[rows]`; all float32."""

    logprobs: NDArray[np.float32]
    losses: NDArray[np.float32]
    metrics: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LossBatch:
    """Shares with one loss. Their rows follow each other, padded to the widest.

    `places` are the shares' indices in the forward that was asked for.
    """

    places: Sequence[int]
    shares: Sequence[Share]

    @property
    def tokens(self) -> int:
        return sum(share.shape.tokens for share in self.shares)

    @property
    def rows(self) -> int:
        return sum(share.shape.rows for share in self.shares)

    @property
    def width(self) -> int:
        return max(share.shape.width for share in self.shares)

    @property
    def targets_per_token(self) -> int:
        return self.shares[0].shape.targets or 1

    def own_targets(self, logprobs: Tensor) -> Tensor:
        """Return the logprobs of this batch's targets, of those of the most targets that a batch has."""
        most = self.targets_per_token
        return logprobs if logprobs.shape[1] == most else logprobs[:, :most]

    def takes(self, share: Share) -> bool:
        """Return whether a share has this loss, and rows that would not be padded to many times their tokens."""
        cells = (self.rows + share.shape.rows) * max(self.width, share.shape.width)
        return _key(share) == _key(self.shares[0]) and cells <= CELLS_PER_TOKEN * (self.tokens + share.shape.tokens)

    def with_share(self, place: int, share: Share) -> LossBatch:
        return LossBatch([*self.places, place], [*self.shares, share])

    def loss(self, logprobs: Tensor) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return logprobs in rows, and loss and metrics per row, for logprobs `[tokens, K]`."""
        device, shape = logprobs.device, self.shares[0].shape
        valid = self._joined([share.arrays.valid for share in self.shares])
        inputs = {
            name: torch.from_numpy(self._joined([share.arrays.loss_inputs[name] for share in self.shares])).to(device)
            for name in self.shares[0].arrays.loss_inputs
        }
        inputs[VALID] = torch.from_numpy(valid).to(device)
        if shape.packed:
            # Computed on the host, because a GPU would stop for the number of places.
            places = torch.from_numpy(np.flatnonzero(valid)).to(device)
            logprobs = logprobs.new_zeros((valid.size, logprobs.shape[1])).index_copy(0, places, logprobs)
        in_rows = logprobs.view(valid.shape if shape.targets is None else (*valid.shape, shape.targets))
        terms = self.shares[0].loss(in_rows, inputs)
        return in_rows, terms.loss.flatten(1).sum(1), terms.metrics

    def split(self, result: ShareResult) -> Iterator[tuple[int, ShareResult]]:
        """Yield the place of each share, and its rows of the batch's result."""
        end = 0
        for place, share in zip(self.places, self.shares, strict=True):
            rows = slice(end, end := end + share.shape.rows)
            metrics = {name: values[rows] for name, values in result.metrics.items()}
            yield place, ShareResult(result.logprobs[rows], result.losses[rows], metrics)

    def _joined(self, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return the rows of all arrays, filled with zeros to the batch's width."""
        if len(arrays) == 1:
            return arrays[0]
        joined = np.zeros((self.rows, self.width, *arrays[0].shape[2:]), arrays[0].dtype)
        end = 0
        for own in arrays:
            joined[end : (end := end + len(own)), : own.shape[1]] = own
        return joined


def plan_batches(shares: Sequence[Share], *, joined: bool) -> list[LossBatch]:
    """Return the batches of shares that have the same loss, or one batch for each share if they are not joined."""
    batches: list[LossBatch] = []
    for place, share in enumerate(shares):
        own = next((number for number, batch in enumerate(batches) if joined and batch.takes(share)), None)
        if own is None:
            batches.append(LossBatch([place], [share]))
        else:
            batches[own] = batches[own].with_share(place, share)
    return batches


def joined_targets(batches: Sequence[LossBatch]) -> NDArray[np.int64]:
    """Return the targets `[tokens, K]` of the computed tokens of all batches, in order.

    K is the largest number of targets per token of a batch. The others are filled with zeros, whose logprobs no loss
    takes.
    """
    most = max(batch.targets_per_token for batch in batches)
    flat = [_flat_targets(share) for batch in batches for share in batch.shares]
    if all(own.shape[1] == most for own in flat):
        return flat[0] if len(flat) == 1 else np.concatenate(flat)
    return np.concatenate([np.pad(own, ((0, 0), (0, most - own.shape[1]))) for own in flat])


def _key(share: Share) -> tuple[object, ...]:
    """Return what two shares with the same loss have in common. A custom loss is never joined: its call runs alone."""
    loss = share.loss
    return loss.name, tuple(sorted(loss.config.items())), frozenset(share.arrays.loss_inputs), share.shape.targets


def _flat_targets(share: Share) -> NDArray[np.int64]:
    arrays = share.arrays
    flat = arrays.targets.reshape(arrays.valid.size, -1)
    return flat[np.flatnonzero(arrays.valid)] if share.shape.packed else flat
