"""The reasons for which a token server gets no new samples, and the probe of its hot swap.

A load of an adapter may fail because of the adapter, or because the server loads no adapter at all. The probe decides:
it loads a small adapter that every server accepts.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import structlog

from tinsmith_trainer.engines.base import AdapterState, LoraSpec

if TYPE_CHECKING:
    from tinsmith_trainer.sampling.token_server.served_model import ServedModel

log = structlog.get_logger(__name__)

PROBE_SECONDS = 10.0
"""The pause between two probes of a server that loads no adapters."""
PROBE_KEY = "probe"
PROBED_MODULES = ("q_proj", "q_a_proj", "o_proj")
"""The last names of the modules that a probe may change, in the order of preference. Servers support all of them."""


class Readiness:
    """The reasons for which the server gets no new samples. Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._unhealthy: str | None = None
        self._cannot_load: str | None = None

    @property
    def reason(self) -> str | None:
        """The reason, as a sentence for waiting clients, or None if the server gets samples."""
        return self._unhealthy or self._cannot_load

    @property
    def load_failure(self) -> str | None:
        """The reason if the server loads no adapters. The reason stays until a probe succeeds."""
        return self._cannot_load

    def note_health(self, name: str, ill_seconds: float, limit_seconds: float) -> None:
        """Note the result of a health check. `ill_seconds` is the time since the last success."""
        self._unhealthy = None
        if ill_seconds > 0:
            self._unhealthy = (
                f"{name} has not been healthy for {ill_seconds:.0f} s: it does not answer, or its engine makes no "
                f"step; after {limit_seconds:g} s it is started again"
            )

    def note_probe(self, failure: str | None) -> bool:
        """Note the result of a probe. Return True if the server has loaded adapters until this failure."""
        with self._guard:
            before = self._cannot_load
            self._cannot_load = None if failure is None else _out_of_routing(failure)
        if before is None and failure is not None:
            log.error("the server loads no adapters, and gets no samples", reason=failure)
        if before is not None and failure is None:
            log.info("the server loads adapters again, and gets samples")
        return before is None and failure is not None


def _out_of_routing(failure: str) -> str:
    return (
        f"this sampler loads no adapters and gets no samples until it does, which is tried every {PROBE_SECONDS:g} s: "
        f"{failure}"
    )


def probe_state(model: ServedModel) -> AdapterState | None:
    """Return an adapter of rank 1 that changes nothing, or None for a model without a module for probes."""
    names = sorted(model.linear_shapes)
    fitting = (name for last in PROBED_MODULES for name in names if name.endswith(f".{last}"))
    module = next(fitting, None)
    if module is None:
        return None
    out_features, in_features = model.linear_shapes[module]
    tensors = {
        f"weights/{module}.lora_A": np.zeros((1, in_features), np.float32),
        f"weights/{module}.lora_B": np.zeros((out_features, 1), np.float32),
    }
    return AdapterState(LoraSpec(rank=1, alpha=1.0, seed=0), optimizer_step=0, tensors=tensors)
