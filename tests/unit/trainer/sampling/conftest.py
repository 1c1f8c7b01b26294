from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), shape=TinyShape(max_sequence_length=1024))


@pytest.fixture(scope="session")
def model(tiny_directory: Path) -> TorchModel:
    return load_torch_model(str(tiny_directory))
