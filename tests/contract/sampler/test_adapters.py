"""The promises of every sampler that holds its adapters itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.sampler.jobs import ask, job, prompt_of, random_adapter
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import EVERY_TOKEN_SERVER, SAMPLERS

pytestmark = pytest.mark.parametrize("sampler", [*SAMPLERS, *EVERY_TOKEN_SERVER], indirect=True)

PROMPT = prompt_of(20)


def test_dropping_an_unknown_adapter_is_ignored(sampler: Sampler) -> None:
    sampler.drop_adapter("never loaded")
    sampler.drop_adapter("")
    ask(sampler, job(PROMPT))


def test_an_adapter_of_another_base_model_is_refused(sampler: Sampler, model: TorchModel) -> None:
    state = random_adapter(model)
    name = next(name for name in state.tensors if name.endswith("lora_A"))
    narrow = replace(state, tensors={**state.tensors, name: state.tensors[name][:, 1:]})
    with pytest.raises(ServerError, match="the base model needs"):
        sampler.load_adapter("narrow", narrow)
    foreign = replace(state, tensors={"weights/vision.lora_A": np.zeros((8, 4), np.float32)})
    with pytest.raises(ServerError, match="weights for vision"):
        sampler.load_adapter("foreign", foreign)
    assert not sampler.has_adapter("narrow")
