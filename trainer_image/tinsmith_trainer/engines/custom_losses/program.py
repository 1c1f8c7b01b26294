"""Evaluation of a custom loss on the CPU, one datum at a time. The model may be on any device.

On the CPU, an index out of range is an error of one loss only; on a GPU, such an index would make the device unusable
for all clients. On the CPU, results are also equal to the results of the SDK's own evaluation.

The cost of a node is counted before the node runs. Limits are counts of values, not seconds, because a replay must end
in the same way as the first run. Before the model's forward, a loss is tested on logprobs of -1, to find mismatched
shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from tinsmith_rpc.custom_losses import Call, CustomLoss, CustomLossInvalid, Named, Ref, loss_of
from torch import Tensor

from tinsmith_trainer.engines.custom_losses.costs import Budget
from tinsmith_trainer.engines.custom_losses.operations import operation
from tinsmith_trainer.errors import UserError

MAX_VALUES = 2**24
"""The limit on the values that all nodes compute for one datum: 64 MiB of float32, plus what autograd keeps."""
VALUES_PER_TOKEN = 2**15
"""The limit on values per token of a datum. With this limit, the number of tokens bounds the time of a microbatch."""
MAX_DIMENSIONS = 8
TRIAL_LOGPROB = -1.0


@dataclass(frozen=True, slots=True)
class DatumLoss:
    """The loss of a datum.

    `gradient` is the gradient with respect to the logprobs, float32 in the shape of the logprobs.

    `gradient` is None if it was not requested.
    """

    loss: float
    gradient: Tensor | None
    metrics: Mapping[str, float]


class Program:
    """The graph of a loss, ready to run."""

    def __init__(self, loss: CustomLoss) -> None:
        self.loss = loss

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Test the loss on one datum before the logprobs are known.

        Raises UserError if the loss cannot be computed, exceeds the limits, or returns a value that is not a loss.
        """
        logprobs = torch.full_like(inputs[0], TRIAL_LOGPROB).requires_grad_()
        with torch.enable_grad():
            loss, metrics = self._evaluated([logprobs, *inputs[1:]])
        if not isinstance(loss, Tensor) or loss.ndim != 0 or not loss.is_floating_point():
            raise self._error(f"must return a scalar float tensor as its loss, not {_described(loss)}")
        if not loss.requires_grad:
            raise self._error("does not depend on logprobs, so there is nothing to train")
        for name, value in metrics.items():
            if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
                raise self._error(f"must return a scalar tensor as {name!r}, not {_described(value)}")

    def run(self, inputs: Sequence[Tensor], *, trains: bool) -> DatumLoss:
        """Compute one datum. Inputs are on the CPU. The first input is `logprobs`, which is not modified.

        Raises UserError if the loss cannot be computed for this datum.
        """
        logprobs = inputs[0].detach().clone().requires_grad_(trains)
        with torch.set_grad_enabled(trains):
            loss, metrics = self._evaluated([logprobs, *inputs[1:]])
            gradient = self._gradient(loss, logprobs) if trains else None
        found = float(loss.detach())
        if not math.isfinite(found) or not (gradient is None or bool(gradient.isfinite().all())):
            raise self._error(
                f"is {found} for a datum of {len(logprobs)} tokens, or its gradient is not finite. Mask ignored "
                "values before an exponential or a division: 0 times infinity is NaN"
            )
        return DatumLoss(found, gradient, {name: float(value.detach()) for name, value in metrics.items()})

    def _gradient(self, loss: Tensor, logprobs: Tensor) -> Tensor:
        try:
            [gradient] = torch.autograd.grad(loss, [logprobs])
        except RuntimeError as error:
            raise self._error(f"has no gradient: {error}") from error
        return gradient

    def _evaluated(self, inputs: Sequence[Tensor]) -> tuple[Any, dict[str, Any]]:
        values: list[Any] = list(inputs)
        budget = Budget(min(MAX_VALUES, VALUES_PER_TOKEN * len(inputs[0])))
        for call in self.loss.calls:
            try:
                values.append(_called(call, values, budget))
            except Exception as error:  # any error of torch concerns this loss
                shapes = ", ".join(
                    f"{declared.name} {list(value.shape)}"
                    for declared, value in zip(self.loss.inputs, inputs, strict=True)
                )
                raise self._error(f"fails at {call.name} ({call.target}) for {shapes}: {error}") from error
        return values[self.loss.loss.value], {name: values[ref.value] for name, ref in self.loss.metrics.items()}

    def _error(self, what: str) -> UserError:
        return UserError(f"The custom loss {self.loss.name!r} {what}.")


@lru_cache(maxsize=64)
def program_of(loss_id: str) -> Program:
    """Return the program of a loss id. Raises UserError for an invalid id or a loss that is not allowed."""
    try:
        return Program(loss_of(loss_id))
    except CustomLossInvalid as error:
        raise UserError(f"The custom loss cannot be run: {error}.") from error


def _called(call: Call, values: Sequence[Any], budget: Budget) -> Any:
    args = _resolved(call.args, values)
    kwargs = {name: _resolved(value, values) for name, value in call.kwargs.items()}
    budget.take(call.target, args, kwargs)
    result = operation(call.target, is_method=call.is_method)(*args, **kwargs)
    _check_value(result)
    return result


def _resolved(argument: Any, values: Sequence[Any]) -> Any:
    match argument:
        case Ref(value):
            return values[value]
        case Named(kind, name):
            return torch.device("cpu") if kind == "device" else getattr(torch, name)
        case tuple() | list():
            return type(argument)(_resolved(entry, values) for entry in argument)
        case dict():
            return {key: _resolved(entry, values) for key, entry in argument.items()}
        case slice():
            return slice(*(_resolved(part, values) for part in (argument.start, argument.stop, argument.step)))
    return argument


def _check_value(value: Any) -> None:
    """Check a node's result. Without the check, a method object, for example, would bypass the allow list."""
    if isinstance(value, tuple | list):
        for entry in value:
            _check_value(entry)
    elif isinstance(value, Tensor):
        if value.ndim > MAX_DIMENSIONS:
            raise ValueError(f"it returns a tensor of {value.ndim} dimensions; the limit is {MAX_DIMENSIONS}")
    elif isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("it returns an integer of more than 64 bits")
    elif not isinstance(value, bool | int | float | torch.dtype | torch.device):
        raise ValueError(f"it returns a {type(value).__name__}, not a tensor or a number")


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
