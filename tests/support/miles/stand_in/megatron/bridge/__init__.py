"""The part of Megatron-Bridge that the stand-in of Miles needs. Its megatron-core is the real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Provider:
    """The provider of a model and its configuration, until it is finalized."""

    directory: str
    params_dtype: str = "the folder's"
    pipeline_dtype: str | None = None
    pipeline_model_parallel_size: int = 1
    calculate_per_token_loss: bool = False

    def finalize(self) -> None:
        if self.pipeline_model_parallel_size > 1 and self.pipeline_dtype is None:
            raise ValueError("When using pipeline parallelism, pipeline_dtype must be specified")


class AutoBridge:
    def __init__(self, directory: str) -> None:
        self._directory = directory

    @classmethod
    def from_hf_pretrained(cls, path: str, **_options: Any) -> AutoBridge:
        return cls(path)

    def to_megatron_provider(self, load_weights: bool = True) -> Provider:
        assert not load_weights
        return Provider(self._directory)
