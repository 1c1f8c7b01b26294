"""The built-in sampler: a decode loop over a transformers model. Each request has a separate seed and adapter."""

from tinsmith_trainer.sampling.builtin.sampler import BuiltinSampler
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings, sampler_settings

__all__ = ["BuiltinSampler", "BuiltinSamplerSettings", "sampler_settings"]
