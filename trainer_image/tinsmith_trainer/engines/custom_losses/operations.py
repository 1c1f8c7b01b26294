"""The implementations of the functions that a custom loss may call, resolved once from the allow list.

Most implementations are torch's own functions. Some functions are restricted, because a small graph could request
endless work. Besides tensors, only numbers within `MAX_POWER` are accepted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tinsmith_rpc.custom_loss_operations import ATTRIBUTES, FUNCTIONS, MATH, METHODS, OPERATORS
from torch import Tensor

Operation = Callable[..., Any]

MAX_POWER = 64
"""The limit for numbers that are not tensors, because Python's integers may have any number of digits."""
MAX_PIECES = 1024


class NotAllowed(ValueError):
    """An error for a loss that calls a function in a way that is not allowed.

    The message is for the author of the loss.
    """


def _looked_up(name: str) -> Operation:
    root, *path = name.split(".")
    found: Any = {"torch": torch, "operator": operator, "math": math}[root]
    for step in path:
        found = getattr(found, step)
    operation: Operation = found
    return operation


def _are_numbers(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, bool | int | float) for value in values)


def _operator(function: Operation, *args: Any) -> Any:
    """Apply an operator to tensors and numbers.

    Refuse operations with results of unlimited size, such as a list times a number, or a number to a large power.
    """
    if any(isinstance(value, Tensor) for value in args):
        return function(*args)
    if not _are_numbers(args):
        raise NotAllowed(f"{function.__name__} takes tensors and numbers")
    if function is operator.pow and abs(args[1]) > MAX_POWER:
        raise NotAllowed(f"a number can be raised to a power of at most {MAX_POWER}")
    return function(*args)


def _math(function: Operation, *args: Any) -> Any:
    if not _are_numbers(args):
        raise NotAllowed(f"math.{function.__name__} takes numbers; torch has a function for tensors")
    return function(*args)


def _attribute(value: Any, name: Any) -> Any:
    if name not in ATTRIBUTES or not isinstance(value, Tensor | tuple):
        raise NotAllowed(f"getattr supports only {', '.join(sorted(ATTRIBUTES))} of a tensor")
    return getattr(value, name)


def _item(value: Any, index: Any) -> Any:
    """Return a part of a tensor, or an entry of a tuple.

    An integer list becomes an `index_select`, because torch's general indexing accumulates gradients in a varying
    order.
    """
    if not isinstance(value, Tensor):
        if not isinstance(index, int | slice):
            raise NotAllowed("the index of a tuple must be an integer or a slice")
        return value[index]
    if isinstance(index, Tensor) and index.dtype != torch.bool:
        if index.ndim != 1:
            raise NotAllowed("an index tensor must have one dimension; use torch.gather for others")
        return torch.index_select(value, 0, index.long())
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.dtype != torch.bool):
            raise NotAllowed("an index may have integers, slices and a mask; use torch.gather for others")
    return value[index]


def _pieces(function: Operation, count: Callable[..., int], value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Split a tensor. The number of pieces is limited, because each piece is a Python object."""
    if (pieces := count(value, *args, **kwargs)) > MAX_PIECES:
        raise NotAllowed(f"a tensor can be split into at most {MAX_PIECES} pieces, not into {pieces}")
    return function(value, *args, **kwargs)


def _unbound(value: Tensor, dim: int = 0) -> int:
    return value.shape[dim]


def _split(value: Tensor, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None) -> int:
    size = split_size if split_size_or_sections is None else split_size_or_sections
    return len(size) if isinstance(size, list | tuple) else -(-value.shape[dim] // max(1, size))


def _chunked(_: Tensor, chunks: int, dim: int = 0) -> int:
    return chunks


def _sections(_: Tensor, indices_or_sections: Any, dim: int = 0) -> int:
    return indices_or_sections if isinstance(indices_or_sections, int) else len(indices_or_sections)


def _divided(function: Operation, *args: Any, rounding_mode: str | None = None, **kwargs: Any) -> Any:
    """Divide. Truncation requires floats.

    If both numbers are integers, a division of the smallest integer by -1 would end the process.
    """
    if rounding_mode == "trunc" and not any(_is_float(value) for value in (*args, *kwargs.values())):
        raise NotAllowed('integers need rounding_mode="floor", or a conversion to floats')
    return function(*args, rounding_mode=rounding_mode, **kwargs)


def _is_float(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def _norm(function: Operation, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute a norm.

    The nuclear norm is refused, because it decomposes a matrix, and the cost rules cover only the number of values.
    """
    if "nuc" in (*args, *kwargs.values()):
        raise NotAllowed("the nuclear norm is not supported")
    return function(value, *args, **kwargs)


_COUNTED: Mapping[str, Callable[..., int]] = {
    "unbind": _unbound,
    "split": _split,
    "chunk": _chunked,
    "tensor_split": _sections,
}


def _to(value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Convert to another dtype. Another device is refused, because the device of a loss is fixed."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.dtype):
            return value.to(argument)
        if isinstance(argument, Tensor):
            return value.to(argument.dtype)
    return value


def _as_is(value: Tensor, *_: Any, **__: Any) -> Tensor:
    return value


def _functions() -> Mapping[str, Operation]:
    found = {name: _looked_up(name) for name in FUNCTIONS - {"getattr"}}
    found |= {name: partial(_operator, found[name]) for name in OPERATORS}
    found |= {name: partial(_math, found[name]) for name in MATH}
    found |= {
        f"torch.{name}": partial(_pieces, found[f"torch.{name}"], count)
        for name, count in (*_COUNTED.items(), ("functional.split", _split))
    }
    found |= {name: partial(_divided, found[name]) for name in ("torch.div", "torch.divide")}
    found |= {name: partial(_norm, found[name]) for name in ("torch.norm", "torch.functional.norm")}
    found |= {"getattr": _attribute, "operator.getitem": _item}
    return found


def _methods() -> Mapping[str, Operation]:
    found: dict[str, Operation] = {name: getattr(Tensor, name) for name in METHODS}
    found |= {name: partial(_pieces, found[name], count) for name, count in _COUNTED.items()}
    found |= {name: partial(_divided, found[name]) for name in ("div", "divide")}
    return found | {"norm": partial(_norm, found["norm"]), "to": _to, "cpu": _as_is}


_FUNCTIONS = _functions()
_METHODS = _methods()


def operation(target: str, *, is_method: bool) -> Operation:
    """Return the implementation of an allowed name."""
    return _METHODS[target] if is_method else _FUNCTIONS[target]
