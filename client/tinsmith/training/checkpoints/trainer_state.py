"""The files `trainer_state.pt` and `optimizer.pt` of a checkpoint.

Both files have PyTorch's format, and are read without executing code that a file may contain.

PyTorch is imported only when a function needs PyTorch, because the import takes seconds.
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
MAY_HOLD = "loop_state may contain numbers, strings, None, tensors, and lists, tuples and dicts of these"


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The state that a loop needs to resume: the position, and the `tinker://` path of weights and optimizer."""

    step: int
    state_path: str
    loop_state: Mapping[str, Any]


def frozen_copy(loop_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state.

    Raises UnfitLoopState if a value is not a number, string, None, tensor, list, tuple or dict.
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
    """Raise UnfitLoopState if a value does not have an allowed type.

    A trial load of the file is not enough, because the result depends on the modules that this process has imported and
    allowed.
    """
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
    """Parse the file's content. Raises CheckpointDamaged."""
    import torch

    try:
        found = torch.load(io.BytesIO(content), weights_only=True)
        return TrainerState(found["step"], found["state_path"], found["loop_state"])
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"trainer_state.pt cannot be read: {error or type(error).__name__}") from error


def write_optimizer(moments: Path, path: Path) -> None:
    """Write the tensors of a safetensors file to a PyTorch file, under the same names."""
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(moments), path)
