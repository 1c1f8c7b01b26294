from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.nemo_rl.bridge import adapted_by_bridge


class CanonicalLoRA:
    def __init__(self, *, target_modules: list[str], dim: int, alpha: int, dropout: float) -> None:
        assert (alpha, dropout) == (dim, 0.0)
        self.target_modules = target_modules
        self.dim = dim

    def transform(self, m: Any, name: str | None = None, prefix: str | None = None) -> Any:
        return m

    def __call__(self, model: Sequence[Any], training: bool = True) -> Sequence[Any]:
        from megatron.core import parallel_state

        assert training
        for chunk in model:
            adapted_by_bridge(chunk, self, parallel_state.get_tensor_model_parallel_world_size())
        return model

    def set_params_to_save(self, model: Sequence[Any]) -> None:
        self.saved = model
