"""Engines under the contract, on the CPU and on a GPU, short ways to drive one, and the parity gate."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from support.engine.places import Place, peft_engine, require_gpus
from support.engine.reference import ReferenceEngine
from support.requirements import require
from support.tiny_models import FEW_EXPERTS, TIED, tiny_directory, tiny_model
from tinsmith_trainer.engines.base import (
    AdamParams,
    AdapterState,
    Call,
    CallRunner,
    Datum,
    Engine,
    LoraSpec,
    LossSpec,
    Outcome,
    Work,
)
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.parity.sides import compute

CROSS_ENTROPY = LossSpec("cross_entropy")
IMPORTANCE_SAMPLING = LossSpec("importance_sampling")

TESTS = Path(__file__).parents[2]
"""Engines of the tests' own are found by their names from here."""

# Adapter slots and the highest rank of every engine under test.
SLOTS, MAX_RANK = 4, 16

EngineFactory = Callable[[], Engine]

_PEFT = PeftEngineSettings(adapter_slots=SLOTS, max_rank=MAX_RANK, token_budget=64)  # so that calls are divided
_RECOMPUTED = replace(_PEFT, recompute_above_tokens=0, loss_kernel="torch")
_ON_RANKS = MegatronSettings(adapter_slots=SLOTS, max_rank=MAX_RANK)
_ON_FAST_RANKS = replace(_ON_RANKS, numerics="fast")  # the default of ranks on GPUs


def _dense_bfloat16(place: Place) -> Engine:
    """Build an engine with a GPU's default products."""
    return peft_engine(place, tiny_directory(), replace(_PEFT, lora_products="bfloat16"), torch.bfloat16)


def _recomputed_experts(place: Place) -> Engine:
    """Build an engine that recomputes layers of a mixture, in float32.

    Rounding to bfloat16 sends some tokens to other experts, and no bound covers that difference.
    """
    return peft_engine(place, tiny_directory("qwen3-moe", FEW_EXPERTS), _RECOMPUTED)


def _nemo_rl_in_process() -> Engine:
    # Megatron and Ray take seconds to import, which tests without them need not wait for.
    from support.nemo_rl.engines import in_process_engine

    return in_process_engine(_ON_RANKS)


def _nemo_rl_over_ray() -> Engine:
    from support.nemo_rl.engines import over_ray_engine

    return over_ray_engine(_ON_FAST_RANKS)


def _miles_in_process() -> Engine:
    from support.miles.ranks import one_rank_engine

    return one_rank_engine(_ON_FAST_RANKS)


ENGINES: dict[str, EngineFactory] = {
    "peft-qwen3": lambda: build_peft_engine(tiny_model("qwen3"), _PEFT),
    "peft-llama3-tied": lambda: build_peft_engine(tiny_model("llama3", TIED), _PEFT),
    "reference": lambda: ReferenceEngine(adapter_slots=SLOTS, max_rank=MAX_RANK),
    "peft-like-gpu-experts-float32": lambda: _recomputed_experts("like-gpu"),
    "peft-like-gpu-bfloat16": lambda: _dense_bfloat16("like-gpu"),
}
if find_spec("megatron") is not None:  # the PEFT worker's image has none, and runs this contract in it
    ENGINES |= {
        "nemo-rl-in-process": _nemo_rl_in_process,
        "nemo-rl-over-ray-fast": _nemo_rl_over_ray,
        "miles-in-process-fast": _miles_in_process,
    }


def spec(engine: Engine, *, rank: int = 4, seed: int = 1) -> LoraSpec:
    """All module families that the engine has."""
    can = engine.capabilities()
    return LoraSpec(rank, 32.0, seed, can.train_attn, can.train_mlp, can.train_unembed)


def forward_backward(
    engine: CallRunner, datums: Sequence[Datum], *, adapter: str = "a", loss: LossSpec = CROSS_ENTROPY
) -> Outcome:
    """One adapter's call, which must not fail."""
    return compute(engine, Work(adapter, datums, loss))


def forward(engine: CallRunner, datums: Sequence[Datum], *, adapter: str = "a") -> Outcome:
    return compute(engine, Work(adapter, datums, CROSS_ENTROPY, forward_only=True))


def compute_together(engine: CallRunner, works: Sequence[Work]) -> list[Outcome]:
    """Compute calls that are under way at the same time and share forwards where they can. None may fail."""
    calls = [engine.start(work) for work in works]
    advance_all(engine, calls)
    return [engine.finish(call) for call in calls]


def advance_all(engine: CallRunner, calls: Sequence[Call]) -> None:
    """Advance the calls until only `finish` is left."""
    while pending := [call for call in calls if call.next_tokens]:
        engine.advance(engine.cobatch(pending))


def train(engine: Engine, datums: Sequence[Datum], steps: int = 1, *, adapter: str = "a") -> None:
    """Train an adapter for a few steps. A fresh adapter's B is zero and hides A's gradient."""
    for _ in range(steps):
        forward_backward(engine, datums, adapter=adapter)
        engine.optim_step(adapter, AdamParams(learning_rate=1e-2))


def group(state: AdapterState, prefix: str) -> dict[str, NDArray[np.float32]]:
    """Return a state's tensors under `prefix/`, by the rest of their names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): values for name, values in state.tensors.items() if name.startswith(start)}


def gradients(engine: Engine, adapter: str = "a") -> dict[str, NDArray[np.float32]]:
    """Return the accumulated gradients, and zeros where there are none."""
    state = engine.state(adapter)
    zeros = {name: np.zeros_like(values) for name, values in group(state, "weights").items()}
    return zeros | group(state, "gradients")


def state_bits(state: AdapterState) -> str:
    return repr(
        (state.lora, state.optimizer_step, [(name, digest(state.tensors[name])) for name in sorted(state.tensors)])
    )


def digest(values: NDArray[np.float32]) -> tuple[str, tuple[int, ...], str]:
    """Return a value that is equal for equal bits, dtype and shape."""
    return str(values.dtype), values.shape, hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


def bits(outcome: Outcome) -> str:
    return repr([output["logprobs"].tolist() for output in outcome.outputs])


def parity(*engines: str, atol: float, steps: int = 3, model: Path | None = None) -> None:
    """Fails unless the engines agree with the first of them; pytest then shows the tables.

    In a process of its own: there is one Ray in a process, and other tests keep theirs.
    """
    sides = [word for engine in engines for word in ("--engine", engine)]
    command = [sys.executable, "-m", "tinsmith_trainer.parity.command", *sides]
    options = ["--model", str(model or tiny_directory()), "--steps", str(steps), "--atol", str(atol)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    finished = subprocess.run([*command, *options], capture_output=True, text=True, check=False, env=environment)
    assert finished.returncode == 0, f"{engines} differ:\n{finished.stdout}{finished.stderr}"


def require_package(name: str, cure: str) -> None:
    require(find_spec(name) is not None, f"The Python package {name} is not installed: {cure}")


def _megatron_on_gpu() -> Engine:
    """One rank of Megatron's own layers, which NeMo RL's and Miles' ranks share. Skips where there is no GPU."""
    require_gpus()
    from support.nemo_rl.engines import in_process_engine

    return in_process_engine(_ON_FAST_RANKS, device="cuda")


GPU_ENGINES: dict[str, EngineFactory] = {
    "peft-gpu-float32": lambda: peft_engine("gpu", tiny_directory(), _PEFT),
    "peft-gpu-experts-float32": lambda: _recomputed_experts("gpu"),
    "peft-gpu-bfloat16": lambda: _dense_bfloat16("gpu"),
}
"""The engines on GPUs, for the contract suite, in addition to `ENGINES`."""
if find_spec("megatron") is not None:
    GPU_ENGINES["megatron-gpu"] = _megatron_on_gpu
