"""Which modules a new adapter trains, and what its A starts from: the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.torch_model.lora import module_family

A_SUFFIX = ".lora_A"
SEEDS = range(-(2**63), 2**64)


def trained_modules(lora: LoraSpec, modules: Iterable[str]) -> tuple[str, ...]:
    """Those of the spec's families, by name. Raises UserError if there are none."""
    chosen = _families(lora)
    trained = tuple(name for name in sorted(modules) if module_family(name) in chosen)
    if not trained:
        raise UserError("The adapter would train nothing: set train_attn, train_mlp or train_unembed.")
    return trained


def check_families(lora: LoraSpec, trained: Iterable[str]) -> None:
    """Raises UserError where one that the spec asks for has no module among these."""
    found = {module_family(name) for name in trained}
    if missing := [family for family in _families(lora) if family not in found]:
        flags = " and ".join(f"train_{family}" for family in missing)
        raise UserError(f"{flags} would train nothing: the model has no such layers. Set {flags} to False.")


def _families(lora: LoraSpec) -> list[str]:
    families = (("attn", lora.train_attn), ("mlp", lora.train_mlp), ("unembed", lora.train_unembed))
    return [family for family, wanted in families if wanted]


def check_limits(lora: LoraSpec, adapters: int, *, max_rank: int, adapter_slots: int) -> None:
    """Whether another adapter may come to those that are there. Raises UserError for its rank, ServerError if not."""
    if not 1 <= lora.rank <= max_rank:
        raise UserError(f"LoRA rank {lora.rank} is outside this server's 1 to {max_rank}; its setting is max_rank.")
    if adapters >= adapter_slots:
        raise ServerError(f"All {adapter_slots} adapter slots are in use; try again when a model is unloaded.")


def check_seed(seed: int) -> None:
    """Raises UserError."""
    if seed not in SEEDS:
        raise UserError(f"Seed {seed} does not fit in 64 bits.")


def draw(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Every A in the order of `shapes`, as PEFT draws it, from the seed on the CPU. B starts as zeros.

    Of three dimensions: an A for each expert.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        if name.endswith(A_SUFFIX):
            drawn = torch.empty(shape)
            for matrix in drawn.view(-1, *shape[-2:]):
                nn.init.kaiming_uniform_(matrix, a=math.sqrt(5), generator=generator)
            yield name, drawn
