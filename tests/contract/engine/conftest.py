"""Every engine keeps the promises in this folder. A new one adds a line to `support.engines.ENGINES`."""

from __future__ import annotations

import pytest
from support.engines import ENGINES, EngineFactory, spec
from support.gpus import GPU_ENGINES
from tinsmith_trainer.engines.base import Engine


@pytest.fixture(params=[*ENGINES, *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_ENGINES)])
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def engine_factory(engine_name: str) -> EngineFactory:
    return ({**ENGINES, **GPU_ENGINES})[engine_name]


@pytest.fixture
def relative_rounding(engine_name: str) -> float:
    """What equal sums in another order may differ by, as a part of the largest."""
    return 2e-2 if engine_name.endswith("bfloat16") else 1e-5


@pytest.fixture
def engine(engine_factory: EngineFactory) -> Engine:
    """With one fresh adapter, `a`."""
    engine = engine_factory()
    engine.create_adapter("a", spec(engine))
    return engine
