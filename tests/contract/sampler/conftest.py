"""Every sampler keeps the promises in this folder. A new backend adds a line to `SAMPLERS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.tiny_model import TinyShape, make_tiny_model
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model

MODELS = {
    "qwen3": ("qwen3", TinyShape(max_sequence_length=1024)),
    "llama3": ("llama3", TinyShape(max_sequence_length=1024)),
    "qwen3-tied": ("qwen3", TinyShape(max_sequence_length=1024, tied_embeddings=True)),
}
SAMPLERS: dict[str, Callable[[TorchModel], Sampler]] = {
    "builtin": lambda model: BuiltinSampler(
        model, BuiltinSamplerSettings(deterministic=True, max_rows=8, prefill_block_tokens=16)
    ),
    "builtin-fast": lambda model: BuiltinSampler(
        model, BuiltinSamplerSettings(deterministic=False, max_rows=8, prefill_block_tokens=16)
    ),
}


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TorchModel]:
    """A tiny model by its name in `MODELS`, loaded once."""
    loaded: dict[str, TorchModel] = {}

    def load(name: str) -> TorchModel:
        if name not in loaded:
            family, shape = MODELS[name]
            directory: Path = make_tiny_model(tmp_path_factory.mktemp(name), family=family, shape=shape)
            loaded[name] = load_torch_model(str(directory))
        return loaded[name]

    return load


@pytest.fixture(scope="session", params=["qwen3"])
def model(request: pytest.FixtureRequest, model_of: Callable[[str], TorchModel]) -> TorchModel:
    """The model under the sampler; parametrize indirectly for others."""
    return model_of(request.param)


@pytest.fixture(params=list(SAMPLERS))
def sampler(request: pytest.FixtureRequest, model: TorchModel) -> Iterator[Sampler]:
    sampler = SAMPLERS[request.param](model)
    yield sampler
    sampler.close()
