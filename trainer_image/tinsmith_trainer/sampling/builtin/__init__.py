"""The built-in sampler: a decode loop over a transformers model, with seeds and adapters per request."""

from tinsmith_trainer.sampling.builtin.sampler import BuiltinSampler
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings

__all__ = ["BuiltinSampler", "BuiltinSamplerSettings"]
