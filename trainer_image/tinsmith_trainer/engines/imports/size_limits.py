"""Limits on the size of an imported adapter's files, computed from the base model before the files are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tinsmith_trainer.engines.base import AnnouncedAdapter, LoraSpec
from tinsmith_trainer.errors import UserError

FAMILIES = ("attn", "mlp", "unembed")
WIDEST_BYTES = 4
CONFIG_BYTES = 2**20
CONFIG_BYTES_OF_A_TENSOR = 64
"""The limit on a configuration's size, in bytes per tensor of the adapter. PEFT's configurations have some kilobytes.

The configuration of a mixture may list the module and the rank of each expert.
"""
EMBEDDING_COPIES = 2
LAYOUTS = 2
"""The number of entries in a weights file for each tensor of an adapter.

Tinker's archives may have a placeholder for each tensor of the base model.
"""
HEADER_BYTES_OF_A_TENSOR = 512
HEADER_SEPARATORS_OF_A_TENSOR = 12
METADATA_BYTES = 64 * 1024
METADATA_SEPARATORS = 1024

Shapes = Mapping[str, tuple[int, ...]]
ShapesOf = Callable[[LoraSpec], Shapes]


@dataclass(frozen=True, slots=True)
class SizeLimits:
    """Limits on the sizes of the weights file and of the file's header, which are checked before any read.

    A parsed header takes about thirty times as much memory as the header's bytes, and a malicious header may be as long
    as the file.
    """

    tensors: int
    tensor_bytes: int

    @classmethod
    def of(
        cls, announced: AnnouncedAdapter, shapes_of: ShapesOf, embedding_shapes: Sequence[tuple[int, ...]] = ()
    ) -> SizeLimits:
        """Return the limits for the largest announced adapter.

        Raises UserError if this base model can have no adapter of the announced families.

        A file with a separate adapter for each expert repeats the factors that Tinsmith's layout shares.
        `embedding_shapes` are the shapes of the base model's embeddings. PEFT may write copies of both embeddings, even
        if the embeddings are tied.
        """
        shapes = _largest_shapes(announced, shapes_of)
        experts = max((shape[0] for shape in shapes.values() if len(shape) == 3), default=1)
        tensors = LAYOUTS * len(shapes) * experts + EMBEDDING_COPIES
        elements = sum(math.prod(shape) for shape in shapes.values()) * experts
        elements += EMBEDDING_COPIES * max(map(math.prod, embedding_shapes), default=0)
        return cls(tensors, elements * WIDEST_BYTES)

    @property
    def config_bytes(self) -> int:
        return self.tensors * CONFIG_BYTES_OF_A_TENSOR + CONFIG_BYTES

    @property
    def header_bytes(self) -> int:
        return self.tensors * HEADER_BYTES_OF_A_TENSOR + METADATA_BYTES

    @property
    def header_separators(self) -> int:
        return self.tensors * HEADER_SEPARATORS_OF_A_TENSOR + METADATA_SEPARATORS

    @property
    def weights_bytes(self) -> int:
        return self.tensor_bytes + self.header_bytes


def _largest_shapes(announced: AnnouncedAdapter, shapes_of: ShapesOf) -> Shapes:
    """Return the shapes of the largest adapter with all announced families."""
    shapes: dict[str, tuple[int, ...]] = {}
    refusal: UserError | None = None
    for family in filter(announced.allows, FAMILIES):
        alone = {f"train_{each}": each == family for each in FAMILIES}
        try:
            shapes |= shapes_of(LoraSpec(announced.rank, 1.0, announced.seed, **alone))
        except UserError as error:
            refusal = error
    if not shapes and refusal is not None:
        raise refusal
    return shapes
