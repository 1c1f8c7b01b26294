"""PEFT engine and built-in sampler over one copy of the base weights, in one process."""

from __future__ import annotations

from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.options import WorkerOptions
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import load_torch_model


def build_colocated(options: WorkerOptions) -> tuple[Engine, Sampler | None]:
    """Loads the base model once for both. Raises ModelDirectoryInvalid."""
    model = load_torch_model(options.model)
    engine = build_peft_engine(
        model,
        PeftEngineSettings(
            adapter_slots=options.adapter_slots,
            max_rank=options.max_rank,
            map_stable_reinforce=options.map_stable_reinforce,
        ),
    )
    return engine, BuiltinSampler(model, BuiltinSamplerSettings(deterministic=options.deterministic_sampling))
