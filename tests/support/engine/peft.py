"""A PEFT engine with adapters that have been trained a little."""

from __future__ import annotations

from support.engine.contract import train
from support.engine.datums import sft_datum
from support.tiny_models import tiny_model
from tinsmith_trainer.engines.base import LoraSpec
from tinsmith_trainer.engines.peft import PeftEngine, PeftEngineSettings, build_peft_engine
from tinsmith_trainer.torch_model.loading import TorchModel

DATUMS = [sft_datum(length, seed) for seed, length in enumerate((5, 20, 12, 40))]


def new_engine(settings: PeftEngineSettings | None = None, model: TorchModel | None = None) -> PeftEngine:
    """With adapters `a` and `b`, both trained a little."""
    engine = build_peft_engine(model or tiny_model(), settings)
    for seed, adapter in enumerate("ab"):
        engine.create_adapter(adapter, LoraSpec(rank=8, alpha=32.0, seed=seed))
        train(engine, DATUMS, adapter=adapter)
    return engine
