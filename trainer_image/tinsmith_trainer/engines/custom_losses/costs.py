"""Upper bounds on the number of values that a node of a custom loss computes.

A bound follows from the shapes of the node's arguments, before the node runs. For most functions, the result has at
most as many values as the arguments after broadcasting. This module has rules for all other functions: functions that
take a size, concatenate tensors, combine all pairs of values, or take more than one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

NODE_VALUES = 512
"""The minimum cost of a node. The minimum cost stands for the overhead of one call of torch, forward and backward."""
SORT_PASSES = 16

Args = Sequence[Any]
Rule = Callable[[Args, Mapping[str, Any]], int]


class TooCostly(ValueError):
    """An error for a loss that exceeds the limits of custom losses. The message is for the author of the loss."""


class Budget:
    """The number of values that a loss may still compute for one datum."""

    def __init__(self, values: int) -> None:
        self._values = self._left = values

    def take(self, target: str, args: Args, kwargs: Mapping[str, Any]) -> None:
        """Subtract the cost of a node. Raises TooCostly."""
        rule = _RULES.get(target.rpartition(".")[2], _stretched)
        self._left -= NODE_VALUES + rule(args, kwargs)
        if self._left < 0:
            raise TooCostly(
                f"the loss would compute more than {self._values} values, the limit for a datum of this length. "
                "Combining shapes [T] and [T, 1] gives T times as many values"
            )


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from tensors_in(entry)


def _stretched(args: Args, kwargs: Mapping[str, Any]) -> int:
    shapes = [tensor.shape for tensor in tensors_in([*args, *kwargs.values()])]
    if not shapes:
        return 0
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return math.prod(max(sizes) if min(sizes) > 0 else 0 for sizes in zip(*aligned, strict=True))


def _concatenated(args: Args, kwargs: Mapping[str, Any]) -> int:
    return sum(tensor.numel() for tensor in tensors_in([*args, *kwargs.values()]))


def _differences(args: Args, kwargs: Mapping[str, Any]) -> int:
    """Return the cost of `diff`. `diff` makes one pass for each order, and autograd keeps the values of all passes."""
    order = int(args[1] if len(args) > 1 else kwargs.get("n", 1))
    return max(1, order) * (NODE_VALUES + _concatenated(args, kwargs))


def _paired(args: Args, kwargs: Mapping[str, Any]) -> int:
    return math.prod(tensor.numel() for tensor in tensors_in([*args, *kwargs.values()]))


def _product(args: Args, kwargs: Mapping[str, Any]) -> int:
    """Return the number of multiplications in a product of matrices or vectors."""
    one: Tensor = _argument(args, kwargs, 0, "input")
    other: Tensor = _argument(args, kwargs, 1, "other", "mat2", "vec", "tensor")
    if other.ndim <= 2:
        return one.numel() * (other.shape[-1] if other.ndim == 2 else 1)
    return one.numel() * other.numel() // max(1, one.shape[-1])


def _sorted(args: Args, kwargs: Mapping[str, Any]) -> int:
    return SORT_PASSES * _stretched(args, kwargs)


def _expanded(args: Args, kwargs: Mapping[str, Any]) -> int:
    value, sizes = args[0], _sizes(args[1:], kwargs)
    own = (1,) * (len(sizes) - value.ndim) + tuple(value.shape)
    return math.prod(have if size == -1 else size for have, size in zip(own, sizes, strict=False))


def _repeated(args: Args, kwargs: Mapping[str, Any]) -> int:
    value: Tensor = args[0]
    return value.numel() * math.prod(_sizes(args[1:], kwargs))


def _padded(args: Args, kwargs: Mapping[str, Any]) -> int:
    """Return the size after padding. Paddings are pairs of numbers, and the first pair is for the last dimension."""
    value, pad = args[0], kwargs["pad"] if len(args) < 2 else args[1]
    more = [max(0, before) + max(0, after) for before, after in zip(pad[::2], pad[1::2], strict=True)]
    more += [0] * (value.ndim - len(more))
    return math.prod(size + extra for size, extra in zip(reversed(value.shape), more, strict=False))


def _made(args: Args, kwargs: Mapping[str, Any]) -> int:
    return math.prod(_sizes(args, kwargs))


def _filled(args: Args, kwargs: Mapping[str, Any]) -> int:
    return math.prod(_sizes(args[:1], kwargs))


def _made_like(args: Args, kwargs: Mapping[str, Any]) -> int:
    return math.prod(_sizes(args[1:], kwargs))


def _filled_like(args: Args, kwargs: Mapping[str, Any]) -> int:
    return math.prod(_sizes(args[1:2], kwargs))


def _counted(args: Args, kwargs: Mapping[str, Any]) -> int:
    """Return the length of `arange`, whose arguments are `end`, or `start, end`, or `start, end, step`."""
    bounds = [*args, *(kwargs[name] for name in ("start", "end", "step") if name in kwargs)]
    start, end, step = map(float, (0, bounds[0], 1) if len(bounds) == 1 else (*bounds, 1)[:3])
    return math.ceil(abs((end - start) / step))


def _selected(args: Args, kwargs: Mapping[str, Any]) -> int:
    """Return the size of the result of `index_select`, which has one slice for each index."""
    value: Tensor = _argument(args, kwargs, 0, "input")
    dim, index = int(_argument(args, kwargs, 1, "dim")), _argument(args, kwargs, 2, "index")
    return value.numel() // max(1, value.shape[dim]) * int(index.numel())


def _item(args: Args, kwargs: Mapping[str, Any]) -> int:
    """Return the size of an indexed part.

    The part is at most as large as the tensor, unless an integer tensor repeats entries.
    """
    value, index = args
    if isinstance(value, Tensor) and isinstance(index, Tensor) and not _is_mask(index):
        return value.numel() // max(1, value.shape[0]) * index.numel()
    return value.numel() if isinstance(value, Tensor) else 0


def _is_mask(index: Tensor) -> bool:
    return index.dtype.itemsize == 1


def _diagonal(args: Args, kwargs: Mapping[str, Any]) -> int:
    value = next(tensors_in([*args, *kwargs.values()]))
    offset = next((entry for entry in (*args[1:], *kwargs.values()) if isinstance(entry, int)), 0)
    return (value.numel() + abs(offset)) ** 2 if value.ndim == 1 else value.numel()


def _argument(args: Args, kwargs: Mapping[str, Any], place: int, *names: str) -> Any:
    """Return an argument by position or name. Named arguments may come in any order."""
    if len(args) > place:
        return args[place]
    for name in names:
        if name in kwargs:
            return kwargs[name]
    raise TooCostly(f"{names[0]} is missing")


def _sizes(args: Args, kwargs: Mapping[str, Any]) -> list[int]:
    """Return sizes that were passed one by one, as a tuple, or by name."""
    for name in ("size", "repeats", "dims", "sizes"):
        if name in kwargs:
            args = [kwargs[name]]
    flat = [size for entry in args for size in (entry if isinstance(entry, tuple | list) else (entry,))]
    if not all(isinstance(size, int) for size in flat):
        raise TooCostly("sizes must be integers")
    return flat


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("cat", "concat", "stack", "hstack", "vstack"), _concatenated),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _product),
    **dict.fromkeys(("outer", "inner"), _paired),
    **dict.fromkeys(("sort", "argsort", "topk", "median"), _sorted),
    **dict.fromkeys(("expand", "broadcast_to"), _expanded),
    **dict.fromkeys(("repeat", "tile"), _repeated),
    **dict.fromkeys(("zeros", "ones"), _made),
    **dict.fromkeys(("new_zeros", "new_ones"), _made_like),
    "diff": _differences,
    "full": _filled,
    "new_full": _filled_like,
    "arange": _counted,
    "pad": _padded,
    "index_select": _selected,
    "gather": _concatenated,
    "getitem": _item,
    "diag": _diagonal,
}
"""The cost rules, by the last part of a function's name."""
