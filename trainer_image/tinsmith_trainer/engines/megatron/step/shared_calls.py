"""Calls of several adapters in one forward on a rank: the rows of each call, and the loss of each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

from tinsmith_trainer.engines.losses import VALID, Inputs, PreparedLoss, Terms
from tinsmith_trainer.engines.megatron.batch import ROW_ID, Batch, packed_lengths
from tinsmith_trainer.engines.megatron.sharding import call_of
from tinsmith_trainer.engines.megatron.step.adapter_route import AdapterRoute, Share, Shares
from tinsmith_trainer.engines.megatron.step.tensor_parts import Tensors

Loss = Callable[[Tensor, Inputs], Terms]
"""A loss of all rows of a microbatch, in the form of `PreparedLoss`."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """A call in the form in which ranks receive it. Picklable.

    `number` names the gradients that the ranks hold until the engine adds or drops them. `datums` is the number of
    datums, and `inputs` are the names of the loss's inputs. `packed`: the rows of a microbatch are packed.
    """

    number: int
    adapter_id: str
    loss: PreparedLoss
    inputs: tuple[str, ...]
    datums: int
    forward_only: bool
    packed: bool


def ends_of(calls: Sequence[RankCall]) -> list[int]:
    """Return the row id after the last row of each call. The row ids of a group count over all calls."""
    return list(accumulate(call.datums for call in calls))


def shares_of(batch: Batch, calls: Sequence[RankCall], tensors: Sequence[Tensors], scales: Sequence[float]) -> Shares:
    """Return the shares of a microbatch in which the rows of each call are consecutive."""
    ends, start, shares = ends_of(calls), 0, []
    starts = [0, *accumulate(packed_lengths(batch))]
    for call, rows in groupby(batch[ROW_ID].tolist(), lambda row_id: call_of(row_id, ends)):
        end = start + len(list(rows))
        packed = slice(starts[start], starts[end]) if calls[0].packed else None
        shares.append(Share(call, slice(start, end), tensors[call], scales[call], packed))
        start = end
    return tuple(shares)


def metric_of(call: int, name: str) -> str:
    """Return the name of a call's metric among the metrics of a group."""
    return f"{call}/{name}"


@dataclass(frozen=True, slots=True)
class SharedLoss:
    """The losses of several calls. Each row has the loss of its call, and the metrics of other calls are 0 there."""

    calls: Sequence[RankCall]
    route: AdapterRoute

    def __call__(self, lp: Tensor, inputs: Inputs) -> Terms:
        losses, metrics = [], {}
        for share in self.route.shares:
            call = self.calls[share.call]
            names = (*call.inputs, VALID)
            terms = call.loss(lp[share.rows], {name: inputs[name][share.rows] for name in names})
            losses.append(terms.loss)
            for name, values in terms.metrics.items():
                in_rows = values.new_zeros(len(lp))
                in_rows[share.rows] = values
                metrics[metric_of(share.call, name)] = in_rows
        loss = torch.cat(losses)
        self.route.follow(loss)
        return Terms(loss, metrics)
