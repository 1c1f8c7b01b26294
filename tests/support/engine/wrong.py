"""The reference engine, wrong in one thing at a time, or one to a process: for the parity gate."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
from support.engine.reference import ReferenceEngine
from tinsmith_trainer.engines.base import AdamParams, Call, LoraSpec, Outcome, Work
from typing_extensions import override

_alive: weakref.WeakSet[ReferenceEngine] = weakref.WeakSet()


class StepsTooFar(ReferenceEngine):
    @override
    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        return super().optim_step(adapter_id, replace(params, learning_rate=1.5 * params.learning_rate))


class StartsElsewhere(ReferenceEngine):
    @override
    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        super().create_adapter(adapter_id, replace(lora, seed=lora.seed + 1))


class RoundsLogprobs(ReferenceEngine):
    @override
    def finish(self, call: Call) -> Outcome:
        outcome = super().finish(call)
        return replace(outcome, outputs=[{"logprobs": np.round(one["logprobs"], 2)} for one in outcome.outputs])


class ForgetsTheFirstCall(ReferenceEngine):
    """An engine that does not add up calls."""

    @override
    def start(self, work: Work) -> Call:
        self.clear_gradients(work.adapter_id)
        return super().start(work)


def steps_too_far(options: Any) -> tuple[ReferenceEngine, None]:
    return StepsTooFar(), None


def starts_elsewhere(options: Any) -> tuple[ReferenceEngine, None]:
    return StartsElsewhere(), None


def rounds_logprobs(options: Any) -> tuple[ReferenceEngine, None]:
    return RoundsLogprobs(), None


def forgets_the_first_call(options: Any) -> tuple[ReferenceEngine, None]:
    return ForgetsTheFirstCall(), None


def finds_no_memory(options: Any) -> tuple[ReferenceEngine, None]:
    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def finds_a_broken_device(options: Any) -> tuple[ReferenceEngine, None]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def build_only_one(options: Any) -> tuple[ReferenceEngine, None]:
    """Fails where the one before is still held."""
    gc.collect()
    assert not _alive, "the engine before is still in memory"
    engine = ReferenceEngine()
    _alive.add(engine)
    return engine, None
