"""Every engine keeps the promises in this folder. A new one adds a line to `support.engines.ENGINES`."""

from __future__ import annotations

import pytest
from support.engines import ENGINES, EngineFactory, spec
from tinsmith_trainer.engines.base import Engine


@pytest.fixture(params=list(ENGINES))
def engine_factory(request: pytest.FixtureRequest) -> EngineFactory:
    return ENGINES[request.param]


@pytest.fixture
def engine(engine_factory: EngineFactory) -> Engine:
    """With one fresh adapter, `a`."""
    engine = engine_factory()
    engine.create_adapter("a", spec(engine))
    return engine
