"""The names in an adapter's state, and whether a saved one fits the model that it is loaded into."""

from __future__ import annotations

from collections.abc import Mapping

from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.errors import CheckpointInvalid

WEIGHTS, GRADIENTS = "weights", "gradients"
EXP_AVG, EXP_AVG_SQ = "adam/exp_avg", "adam/exp_avg_sq"


def groups_of(state: AdapterState) -> list[str]:
    """Weights, which are always needed, and what else the state holds."""
    return [WEIGHTS, *(group for group in (EXP_AVG, EXP_AVG_SQ, GRADIENTS) if has_group(state, group))]


def has_group(state: AdapterState, group: str) -> bool:
    return any(name.startswith(f"{group}/") for name in state.tensors)


def check_state(state: AdapterState, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointInvalid unless every group holds exactly the tensors `shapes`, by `<module>.lora_A|B`."""
    groups = groups_of(state)
    if (EXP_AVG in groups) != (EXP_AVG_SQ in groups) or (state.optimizer_step > 0 and EXP_AVG not in groups):
        raise CheckpointInvalid(
            f"The saved optimizer state of step {state.optimizer_step} lacks one or both of Adam's moments."
        )
    expected = {f"{group}/{name}": shape for group in groups for name, shape in shapes.items()}
    if missing := expected.keys() - state.tensors.keys():
        raise CheckpointInvalid(f"The saved adapter lacks {_some(missing)}: it is of another base model or incomplete.")
    if extra := state.tensors.keys() - expected.keys():
        raise CheckpointInvalid(f"The saved adapter holds {_some(extra)}, which this base model does not have.")
    for name, shape in expected.items():
        if state.tensors[name].shape != shape:
            raise CheckpointInvalid(
                f"The saved tensor {name} has shape {list(state.tensors[name].shape)}, this base model needs "
                f"{list(shape)}: the checkpoint is of another base model or rank."
            )


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
