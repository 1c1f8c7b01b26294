"""The reference engine as it behaves with `numerics: fast`: each process rounds differently.

It assumes that a GPU's sums differ by a factor of about 1e-6 in every element of a gradient, in each process anew.
`TINSMITH_REPLAY_FAULT` makes every process but the first of a volume replay wrongly: its first step is lost or doubled.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from support.engine.reference import ReferenceCall, ReferenceEngine
from tinsmith_trainer.engines.base import AdamParams, Call, EngineCapabilities, Outcome
from typing_extensions import override

ROUNDING = 1e-6
FAULT_VARIABLE = "TINSMITH_REPLAY_FAULT"
LOST, DOUBLED = "lost", "doubled"


class RoundingEngine(ReferenceEngine):
    def __init__(self, *args: Any, fault: str | None = None) -> None:
        super().__init__(*args)
        self._noise = np.random.default_rng(os.getpid())
        self._fault = fault

    @override
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities(), numerics="fast", batch_invariant=False)

    @override
    def finish(self, call: Call) -> Outcome:
        for gradient in cast("ReferenceCall", call).scratch.values():
            np.multiply(
                gradient, 1 + ROUNDING * self._noise.standard_normal(gradient.shape), gradient, casting="unsafe"
            )
        return super().finish(call)

    @override
    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        fault, self._fault = self._fault, None
        if fault == LOST:
            self.clear_gradients(adapter_id)
            return {"grad_norm": 0.0, "step": float(self._adapters[adapter_id].step)}
        if fault == DOUBLED:
            gradients = dict(self._adapters[adapter_id].gradients)
            super().optim_step(adapter_id, params)
            self._adapters[adapter_id].gradients = gradients
        return super().optim_step(adapter_id, params)


def build_rounding(options: Any) -> tuple[RoundingEngine, None]:
    """Build the engine for a worker's `--engine support.engine.rounding:build_rounding`."""
    marker = Path(options.volume) / "started-before"
    is_first = not marker.exists()
    marker.touch()
    fault = None if is_first else os.environ.get(FAULT_VARIABLE)
    return RoundingEngine(options.model, options.adapter_slots, min(options.max_rank, 16), fault=fault), None
