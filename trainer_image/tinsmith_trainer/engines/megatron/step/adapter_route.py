"""The adapters of a microbatch's rows, in a forward that several calls share.

A model holds one adapter. In a shared forward, consecutive rows of a microbatch belong to one call, and use the
adapter of this call. All adapted layers of a rank read the shares of the microbatch from one `AdapterRoute`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one call in a microbatch.

    `call` is the index of the call in its group. `tensors` are this rank's parts of the call's adapter, by name, and
    `scale` is alpha divided by the rank. `packed` are the call's tokens if the rows are packed, otherwise None.
    """

    call: int
    rows: slice
    tensors: Mapping[str, Tensor]
    scale: float
    packed: slice | None = None

    @property
    def dimension(self) -> int:
        """The dimension in which the shares of hidden states follow each other."""
        return 1 if self.packed is None else 0

    def of(self, x: Tensor) -> Tensor:
        """Return the share's part of hidden states, `[length, rows, d]` or, if they are packed, `[tokens, 1, d]`."""
        return x[:, self.rows] if self.packed is None else x[self.packed]

    def tokens(self, x: Tensor) -> int:
        """Return the number of tokens of the share's part of `x`."""
        return self.of(x)[..., 0].numel()


Shares = tuple[Share, ...]


class AdapterRoute:
    """The shares of the current microbatch. Without shares, all rows use the adapter in the model."""

    def __init__(self) -> None:
        self.shares: Shares = ()

    @contextmanager
    def through(self, chunk: nn.Module, by_microbatch: Sequence[Shares]) -> Iterator[None]:
        """Set the shares of the next microbatch before each forward of `chunk`, a rank's part of the model."""
        coming = iter(by_microbatch)

        def enter(*_: Any) -> None:
            self.shares = next(coming)

        def leave(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
            self.follow(out)

        hooks = [chunk.register_forward_pre_hook(enter), chunk.register_forward_hook(leave)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.shares = ()

    def follow(self, computed: Tensor) -> None:
        """Set the current shares again when backward reaches this tensor, for layers that are computed again.

        Pipeline stages compute the forward of a later microbatch before the backward of an earlier one.
        """
        shares = self.shares

        def restore(_gradient: Tensor) -> None:
            self.shares = shares

        if computed.requires_grad:
            computed.register_hook(restore)  # type: ignore[no-untyped-call]
