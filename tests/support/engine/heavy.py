"""The reference engine, with adapters whose state is as large as a test says.

Of a model of rank `HEAVY_RANK` it takes the bytes that `TINSMITH_TEST_HEAVY_BYTES` says, in snapshots and in training
checkpoints alike.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
from support.engine.reference import ReferenceEngine
from support.worker.process import Call, create
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.engines.base import AdapterState
from typing_extensions import override

HEAVY_BYTES = "TINSMITH_TEST_HEAVY_BYTES"
HEAVY_RANK = 16


class HeavyEngine(ReferenceEngine):
    def __init__(self, *arguments: Any, heavy_bytes: int = 0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.heavy_bytes = heavy_bytes or int(os.environ.get(HEAVY_BYTES, "0"))

    @override
    def state(self, adapter_id: str) -> AdapterState:
        state = super().state(adapter_id)
        if state.lora.rank == HEAVY_RANK:
            state.tensors["adam/padding"] = np.zeros(self.heavy_bytes // 4, np.float32)
        return state


def create_heavy(model_id: str) -> Call:
    call = create(model_id=model_id)
    request = worker_pb2.CreateModel.FromString(call.payload)
    request.lora.rank = HEAVY_RANK
    return replace(call, payload=request.SerializeToString())


def build_heavy(options: Any) -> tuple[HeavyEngine, None]:
    """Build the engine for a worker's `--engine`."""
    return HeavyEngine(options.model, options.adapter_slots, min(options.max_rank, HEAVY_RANK)), None
