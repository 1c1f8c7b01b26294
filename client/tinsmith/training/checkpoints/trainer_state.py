"""`trainer_state.pt` and `optimizer.pt`: PyTorch's files, which are read without running anything they hold.

PyTorch is imported when it is needed: to list checkpoints takes no seconds.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinsmith.training.errors import CheckpointDamaged, UnfitLoopState

PLAIN = (type(None), bool, int, float, str, bytes)
MAY_HOLD = "loop_state may hold numbers, strings, None, tensors, and lists, tuples and dicts of them"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What a loop needs to go on: where it was, and the `tinker://` path of weights and optimizer."""

    step: int
    state_path: str
    loop_state: Mapping[str, Any]


def frozen_copy(loop_state: Mapping[str, Any]) -> dict[str, Any]:
    """As it is now, whatever the loop does to it later.

    Raises UnfitLoopState for other things than numbers, strings, None, tensors, and lists, tuples and dicts of them.
    """
    import torch

    written = io.BytesIO()
    _require_plain(dict(loop_state), "loop_state")
    try:
        torch.save(dict(loop_state), written)
        written.seek(0)
        copied: dict[str, Any] = torch.load(written, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError, RuntimeError) as error:
        raise UnfitLoopState(f"{MAY_HOLD}: {str(error).partition(chr(10))[0]}") from error
    return copied


def _require_plain(value: Any, where: str) -> None:
    """By their types: what PyTorch reads back depends on what else a process has imported, and allowed it to."""
    import torch

    if type(value) in PLAIN or isinstance(value, torch.Tensor):
        return
    if type(value) in (list, tuple):
        for place, item in enumerate(value):
            _require_plain(item, f"{where}[{place}]")
    elif type(value) in (dict, OrderedDict):
        for key, item in value.items():
            _require_plain(key, f"a key of {where}")
            _require_plain(item, f"{where}[{key!r}]")
    else:
        raise UnfitLoopState(f"{MAY_HOLD}: {where} is of {type(value).__module__}.{type(value).__qualname__}")


def write_trainer_state(path: Path, state: TrainerState) -> None:
    import torch

    torch.save({"step": state.step, "state_path": state.state_path, "loop_state": dict(state.loop_state)}, path)


def read_trainer_state(content: bytes) -> TrainerState:
    """Raises CheckpointDamaged."""
    import torch

    try:
        found = torch.load(io.BytesIO(content), weights_only=True)
        return TrainerState(found["step"], found["state_path"], found["loop_state"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"trainer_state.pt cannot be read: {error or type(error).__name__}") from error


def write_optimizer(moments: Path, path: Path) -> None:
    """From tensors in a file of safetensors, under the names that they have there."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(moments), path)
