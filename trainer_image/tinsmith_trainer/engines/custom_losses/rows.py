"""Custom losses over a call's datums: the inputs as arrays, and the rows of a microbatch, one row for each datum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from tinsmith_rpc import CUSTOM_LOSS
from tinsmith_rpc.custom_losses import LossInput
from torch import Tensor

from tinsmith_trainer.engines.base import Datum, LossSpec
from tinsmith_trainer.engines.custom_losses.program import Program, program_of
from tinsmith_trainer.errors import UserError

LOSS_ID = "loss_id"
TARGETS = "target_tokens"

MAX_KINDS = 16
"""The limit on the number of combinations of input types in a call's datums.

The loss is tested twice for each combination of input types.
"""

Numbers = NDArray[np.int64] | NDArray[np.float32]


def program_for(spec: LossSpec) -> Program:
    """Return the program of a call's `loss_fn_config`. Raises UserError if the config or the loss is invalid."""
    loss_id = spec.config.get(LOSS_ID)
    if spec.config.keys() != {LOSS_ID} or not isinstance(loss_id, str):
        raise UserError(f"loss_fn_config of {CUSTOM_LOSS} must hold only {LOSS_ID}, which create_custom_loss returns.")
    return program_of(loss_id)


def custom_arrays(program: Program, datums: Sequence[Datum]) -> list[dict[str, Numbers]]:
    """Return the loss's inputs for each datum, except `logprobs`, as arrays with a row per token.

    A scalar is repeated for each token, so that all inputs have the same layout. Unused inputs are left out. Raises
    UserError for a datum that does not fit the loss, before anything is computed.
    """
    arrays = [_arrays(program, index, datum) for index, datum in enumerate(datums)]
    _check_widths(program, arrays)
    for index in _extremes(program, datums, arrays):
        program.check(_inputs(program, datums[index], arrays[index]))
    return arrays


def _extremes(program: Program, datums: Sequence[Datum], arrays: Sequence[Mapping[str, Numbers]]) -> list[int]:
    """Return the datums with the fewest and the most targets, for each combination of input types."""
    by_types: dict[tuple[str, ...], list[int]] = {}
    names = [declared.name for declared in program.loss.inputs[1:]]
    for index, own in enumerate(arrays):
        by_types.setdefault(tuple(own[name].dtype.name for name in names), []).append(index)
    if len(by_types) > MAX_KINDS:
        raise UserError(
            f"The call's datums have inputs of {len(by_types)} combinations of types; the limit of a custom loss is "
            f"{MAX_KINDS}. Use the same type for each input in all datums."
        )
    sizes = [datum.loss_inputs[TARGETS].size for datum in datums]
    return [choice(alike, key=sizes.__getitem__) for alike in by_types.values() for choice in (min, max)]


def _inputs(program: Program, datum: Datum, arrays: Mapping[str, Numbers]) -> list[Tensor]:
    """Return the inputs for a run of the loss; the logprobs are an empty tensor of the right shape."""
    _, *read = program.loss.inputs
    tensors = [torch.from_numpy(arrays[declared.name].copy()) for declared in read]
    others = [tensor[0] if declared.rank == 0 else tensor for declared, tensor in zip(read, tensors, strict=True)]
    return [torch.empty(datum.loss_inputs[TARGETS].shape), *others]


def _arrays(program: Program, index: int, datum: Datum) -> dict[str, Numbers]:
    logprobs, *read = program.loss.inputs
    _input_of(index, datum, LossInput(TARGETS, logprobs.rank))
    return {declared.name: _laid_out(index, datum, declared) for declared in read}


def _input_of(index: int, datum: Datum, declared: LossInput) -> Numbers:
    values = datum.loss_inputs.get(declared.name)
    if values is None:
        raise UserError(f"Datum {index}: the custom loss needs the input {declared.name}.")
    if declared.rank == datum.length == 1:
        values = values.reshape(values.shape or 1)  # one value without a shape
    if values.ndim != declared.rank:
        raise UserError(
            f"Datum {index}: {declared.name} has shape {list(values.shape)}; the custom loss declares rank "
            f"{declared.rank} for it."
        )
    return values


def _laid_out(index: int, datum: Datum, declared: LossInput) -> Numbers:
    values, targets = _input_of(index, datum, declared), datum.loss_inputs[TARGETS]
    if declared.rank == 0:
        return cast("Numbers", np.full(datum.length, values, values.dtype))
    if len(values) != datum.length or (declared.rank == targets.ndim == 2 and values.shape != targets.shape):
        raise UserError(
            f"Datum {index}: {declared.name} has shape {list(values.shape)}, {TARGETS} has {list(targets.shape)}; both "
            f"need one row per token, and equally many columns."
        )
    return values


def _check_widths(program: Program, arrays: Sequence[Mapping[str, Numbers]]) -> None:
    """Require an equal number of columns in all inputs.

    If the targets have one column, a batch does not store the number of columns of other inputs.
    """
    if program.loss.inputs[0].rank == 2:
        return
    for declared in program.loss.inputs[1:]:
        if declared.rank == 2 and len(widths := {own[declared.name].shape[1] for own in arrays}) > 1:
            raise UserError(
                f"{declared.name} has {sorted(widths)} columns in one call's datums; all datums need equally many."
            )


@dataclass(frozen=True, slots=True)
class RowLosses:
    """The losses of a microbatch's rows.

    `loss` has the shape of the logprobs, and the sum of a row is the loss of a datum. `metrics` are `[rows]`, by
    `name:reduction`.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


def row_losses(program: Program, logprobs: Tensor, inputs: Mapping[str, Tensor], valid: Tensor) -> RowLosses:
    """Compute each row separately and without padding, so that the bits of one row do not depend on other rows.

    The values that autograd keeps for the gradient are freed row by row. The computed value of a loss is a constant for
    autograd. A term with the value 0 is added to the loss, and carries the gradient to the model. Raises UserError if
    the loss of a row cannot be computed.
    """
    trains = torch.is_grad_enabled() and logprobs.requires_grad
    host = {name: values.cpu() for name, values in inputs.items()} | {"": logprobs.detach().cpu()}
    gradient, losses = torch.zeros_like(host[""]), torch.zeros_like(host[""])
    metrics = {name: torch.zeros(len(gradient)) for name in program.loss.metrics}
    for row, length in enumerate(valid.sum(1).tolist()):
        if length == 0:
            continue
        found = program.run(_inputs_of_row(program, host, row, length), trains=trains)
        losses[row].view(-1)[0] = found.loss
        if found.gradient is not None:
            gradient[row, :length] = found.gradient
        for name, value in found.metrics.items():
            metrics[name][row] = value
    gradient, losses = gradient.to(logprobs.device), losses.to(logprobs.device)
    used = torch.where(gradient != 0, logprobs, 0.0)  # -inf minus -inf is NaN
    return RowLosses((used - used.detach()) * gradient + losses, metrics)


def _inputs_of_row(program: Program, host: Mapping[str, Tensor], row: int, length: int) -> list[Tensor]:
    _, *read = program.loss.inputs
    others = (
        host[declared.name][row, 0] if declared.rank == 0 else host[declared.name][row, :length] for declared in read
    )
    return [host[""][row, :length], *others]
