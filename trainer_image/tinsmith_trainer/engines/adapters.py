"""Rules that every engine shares: an adapter's modules, initial weights, limits, state and AdamW parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from tinsmith_trainer.engines.base import AdamParams, AdapterState, LoraSpec
from tinsmith_trainer.errors import CheckpointInvalid, ServerError, UserError
from tinsmith_trainer.torch_model.lora import module_family

A_SUFFIX = ".lora_A"
SEEDS = range(-(2**63), 2**64)


def trained_modules(lora: LoraSpec, modules: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the modules in the spec's families, sorted.

    Raises UserError if the model has no module of these families.
    """
    chosen = _families(lora)
    trained = tuple(name for name in sorted(modules) if module_family(name) in chosen)
    if not trained:
        raise UserError("The adapter would train nothing: set train_attn, train_mlp or train_unembed.")
    return trained


def check_families(lora: LoraSpec, trained: Iterable[str]) -> None:
    """Raise UserError if the trained modules contain no module of a requested family."""
    found = {module_family(name) for name in trained}
    if missing := [family for family in _families(lora) if family not in found]:
        flags = " and ".join(f"train_{family}" for family in missing)
        raise UserError(f"{flags} would train nothing: the model has no such layers. Set {flags} to False.")


def _families(lora: LoraSpec) -> list[str]:
    families = (("attn", lora.train_attn), ("mlp", lora.train_mlp), ("unembed", lora.train_unembed))
    return [family for family, is_trained in families if is_trained]


def check_limits(lora: LoraSpec, adapters: int, *, max_rank: int, adapter_slots: int) -> None:
    """Raise UserError if the rank exceeds the limit, ServerError if no adapter slot is free."""
    if not 1 <= lora.rank <= max_rank:
        raise UserError(f"LoRA rank {lora.rank} is outside this server's 1 to {max_rank}; its setting is max_rank.")
    if adapters >= adapter_slots:
        raise ServerError(f"All {adapter_slots} adapter slots are in use; retry after a model is unloaded.")


def check_seed(seed: int) -> None:
    """Raise UserError if the seed does not fit in 64 bits."""
    if seed not in SEEDS:
        raise UserError(f"Seed {seed} does not fit in 64 bits.")


def draw(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Draw every A from the seed, on the CPU, in the order of `shapes` and with PEFT's distribution. B starts as zeros.

    A shape of three dimensions holds one A for each expert.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(A_SUFFIX):
            drawn = torch.empty(shape)
            for matrix in drawn.view(-1, *shape[-2:]):
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
            yield name, drawn


WEIGHTS, GRADIENTS = "weights", "gradients"
EXP_AVG, EXP_AVG_SQ = "adam/exp_avg", "adam/exp_avg_sq"


def groups_of(state: AdapterState) -> list[str]:
    """Return the groups of tensors that the state holds.

    The group of weights is always in the list.
    """
    return [WEIGHTS, *(group for group in (EXP_AVG, EXP_AVG_SQ, GRADIENTS) if has_group(state, group))]


def has_group(state: AdapterState, group: str) -> bool:
    return any(name.startswith(f"{group}/") for name in state.tensors)


def check_state(state: AdapterState, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointInvalid unless each group holds exactly the tensors in `shapes`, named `<module>.lora_A|B`."""
    groups = groups_of(state)
    if (EXP_AVG in groups) != (EXP_AVG_SQ in groups) or (state.optimizer_step > 0 and EXP_AVG not in groups):
        raise CheckpointInvalid(
            f"The saved optimizer state of step {state.optimizer_step} lacks one or both of Adam's moments."
        )
    expected = {f"{group}/{name}": shape for group in groups for name, shape in shapes.items()}
    if missing := expected.keys() - state.tensors.keys():
        raise CheckpointInvalid(
            f"The saved adapter lacks {_some(missing)}: it belongs to another base model, or is incomplete."
        )
    if extra := state.tensors.keys() - expected.keys():
        raise CheckpointInvalid(f"The saved adapter holds {_some(extra)}, which this base model does not have.")
    for name, shape in expected.items():
        if state.tensors[name].shape != shape:
            raise CheckpointInvalid(
                f"The saved tensor {name} has shape {list(state.tensors[name].shape)}, this base model needs "
                f"{list(shape)}: the checkpoint has another base model or rank."
            )


def _some(names: set[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


SMALLEST_EPS = 1e-37
LARGEST = 1e9
"""The limit for AdamW's hyperparameters. Up to this limit, no product overflows float32, for any bias correction."""


def check_adam(params: AdamParams) -> None:
    """Raise UserError for hyperparameters outside the ranges of torch's AdamW."""
    ranges = {
        "learning_rate": 0 <= params.learning_rate <= LARGEST,
        "beta1": 0 <= params.beta1 < 1,
        "beta2": 0 <= params.beta2 < 1,
        # A new adapter's A has a gradient of exactly zero: without eps the first step divides 0 by 0.
        "eps": SMALLEST_EPS <= params.eps <= LARGEST,
        "weight_decay": 0 <= params.weight_decay <= LARGEST,
        "grad_clip_norm": params.grad_clip_norm >= 0,
    }
    allowed = {
        "learning_rate": f"from 0 to {LARGEST:g}",
        "beta1": "from 0 to below 1",
        "beta2": "from 0 to below 1",
        "eps": f"from {SMALLEST_EPS} to {LARGEST:g}",
        "weight_decay": f"from 0 to {LARGEST:g}",
    }
    for name, within in ranges.items():
        value = getattr(params, name)
        if not within or not math.isfinite(value):
            raise UserError(f"optim_step: {name} is {value}; it must be finite and {allowed.get(name, 'at least 0')}.")


def check_norm(norm: float) -> None:
    """Raise UserError unless the gradient's norm is finite.

    The caller drops the gradient, whether it is finite or not.
    """
    if not math.isfinite(norm):
        raise UserError(
            f"optim_step was skipped: the gradient's norm is {norm}. The gradient was dropped; weights and "
            f"optimizer are unchanged. Look for extreme advantages, weights or logprobs in the data: a "
            f"sampler_gap:max above 88 in a forward_backward's metrics means that a ratio exp(lp - q) exceeds float32. "
            f"Set the advantage to 0 for tokens whose logprob is a placeholder, such as -9999."
        )


def step_metrics(norm: float, params: AdamParams, step: int) -> dict[str, float]:
    """Return the metrics of an optim_step. `norm` is the norm before clipping; `step` counts this step, too."""
    return {"grad_norm": norm, "learning_rate": params.learning_rate, "step": float(step)}
