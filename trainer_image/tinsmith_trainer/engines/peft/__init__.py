"""The PEFT engine: transformers model, our LoRA layers, PEFT file format."""

from __future__ import annotations

from tinsmith_trainer.engines.peft.engine import PeftEngine
from tinsmith_trainer.engines.peft.settings import PeftEngineSettings, device_settings
from tinsmith_trainer.torch_model.loading import TorchModel

__all__ = ["PeftEngine", "PeftEngineSettings", "build_peft_engine"]


def build_peft_engine(torch_model: TorchModel, settings: PeftEngineSettings | None = None) -> PeftEngine:
    """Return an engine without adapters for a loaded base model, by default with the settings of its device."""
    return PeftEngine(torch_model, settings or device_settings(torch_model.device.type, torch_model.model.dtype))
