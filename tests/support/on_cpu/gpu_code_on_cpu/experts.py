"""Megatron's grouped experts, with a plain product for each in the place of TransformerEngine's grouped one.

`TEGroupedMLP` is Megatron's own, and what NeMo RL's models have on GPUs; its two layers are TransformerEngine's. What
they are called with, and what their weights are called, is Megatron's (`GroupedLinearFc1Interface` in
`megatron/core/transformer/moe/experts.py`, `TEGroupedLinear` in `megatron/core/extensions/transformer_engine.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def group_experts() -> None:
    """Megatron's local layers have experts one by one, whatever is asked for."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    one_by_one = LocalSpecProvider.grouped_mlp_modules

    def grouped_mlp_modules(provider: Any, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            return one_by_one(provider, moe_use_grouped_gemm)
        layers = GroupedMLPSubmodules(TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)
        return partial(TEGroupedMLP, submodules=layers)

    LocalSpecProvider.grouped_mlp_modules = grouped_mlp_modules


class _GroupedLinear(nn.Module):
    """All of a rank's experts, whole: they are not divided among tensor ranks."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        assert pg_collection.expt_tp.size() == 1, "these divide no expert among tensor ranks"
        self.config = config
        self._groups = pg_collection
        self._experts = num_gemms
        for number in range(num_gemms):
            weight: Any = nn.Parameter(torch.zeros(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = pg_collection.ep.size() == 1
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: Tensor, m_splits: Sequence[int]) -> tuple[Tensor, None]:
        rows = torch.split(x, m_splits)
        return torch.cat([own @ self.get_parameter(f"weight{number}").T for number, own in enumerate(rows)]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Experts of all ranks are a dimension of what is saved."""
        from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        assert not metadata.get("singleton_local_shards"), "these know one form of checkpoints"
        found: dict[str, Any] = {}
        for number in range(self._experts):
            of_all = self._groups.ep.rank() * self._experts + number
            place = (len(sharded_offsets), of_all, self._groups.ep.size() * self._experts)
            own = make_sharded_tensors_for_checkpoint(
                {f"{number}.weight": self.get_parameter(f"weight{number}")},
                "",
                {},
                (*sharded_offsets, place),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(own, f"{number}.", prefix)
            tensor = own[f"{number}.weight"]
            tensor.replica_id = (*tensor.replica_id[:2], self._groups.expt_dp.rank())
            found[f"{prefix}weight{number}"] = tensor
        return found


class TEColumnParallelGroupedLinear(_GroupedLinear):
    """A layer whose name tells Megatron-Bridge how its weights are divided."""


class TERowParallelGroupedLinear(_GroupedLinear):
    """The same."""
