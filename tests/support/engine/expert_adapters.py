"""An adapter of a layer's experts, of random numbers, as engines here hold it."""

from __future__ import annotations

import numpy as np

EXPERTS, RANK, WIDTH, HIDDEN = 3, 2, 5, 4
NAME = "model.layers.0.mlp.experts"


def expert_adapter(*, gated: bool = True) -> dict[str, np.ndarray]:
    """Return an adapter of experts that share the factor at the hidden size. `gated` layers have a third projection."""
    draw = np.random.default_rng(0)
    shapes = {"w1": ((1, RANK, HIDDEN), (EXPERTS, WIDTH, RANK)), "w2": ((EXPERTS, RANK, WIDTH), (1, HIDDEN, RANK))}
    if gated:
        shapes["w3"] = shapes["w1"]
    return {
        f"{NAME}.{part}.lora_{letter}": draw.normal(size=shape).astype(np.float32)
        for part, both in shapes.items()
        for letter, shape in zip("AB", both, strict=True)
    }
