"""Every engine keeps the promises in this folder. A new one adds a line to `support.engine.contract.ENGINES`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.engine.contract import ENGINES, GPU_ENGINES, EngineFactory, spec
from tinsmith_trainer.engines.base import Engine

FOLDER = Path(__file__).parent


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the ranks that these tests share with the last test: an idle Ray keeps a machine busy."""
    if nextitem is None or not nextitem.path.is_relative_to(FOLDER):
        # Only who asked for them has imported what starts them.
        engines = sys.modules.get("support.nemo_rl.engines")
        if engines is not None:
            engines.close_shared_ranks()


# What `make test` asks: the others are these on other devices, in another precision, or over ranks.
QUICK_ENGINES = {"peft-qwen3", "reference"}
_LATER = pytest.mark.slow("another engine keeps the same promise")


@pytest.fixture(
    params=[
        *(pytest.param(name, marks=[] if name in QUICK_ENGINES else _LATER) for name in ENGINES),
        *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_ENGINES),
    ]
)
def engine_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def engine_factory(engine_name: str) -> EngineFactory:
    return ({**ENGINES, **GPU_ENGINES})[engine_name]


@pytest.fixture
def relative_rounding(engine_name: str) -> float:
    """Return the difference that equal sums in another order may have, as a part of the largest.

    In bfloat16, six draws of three targets differed by 1.4e-2 to 2.9e-2 on a CPU.
    """
    return 5e-2 if engine_name.endswith("bfloat16") else 1e-5


@pytest.fixture
def logprob_rounding(engine_name: str) -> float:
    """Return the difference that co-batching may make to a datum's logprobs.

    On a CPU, products of other shapes round alike.
    """
    return 2e-2 if engine_name in GPU_ENGINES and engine_name.endswith("bfloat16") else 1e-4


@pytest.fixture
def cobatch_rounding(engine_name: str, relative_rounding: float) -> float:
    """Return the difference that a shared forward may make to a value, as a part of the largest: none if exact."""
    is_fast = engine_name in GPU_ENGINES or "like-gpu" in engine_name or engine_name.endswith("fast")
    return relative_rounding if is_fast else 0.0


@pytest.fixture
def division_rounding(engine_name: str, relative_rounding: float) -> float:
    """Return the difference that dividing a call may make to a gradient, as a part of the largest element.

    Products in bfloat16 round the gradient of each microbatch.
    """
    return relative_rounding if engine_name in GPU_ENGINES or engine_name.endswith("bfloat16") else 1e-6


@pytest.fixture
def engine(engine_factory: EngineFactory) -> Engine:
    """Return an engine with one fresh adapter, `a`."""
    engine = engine_factory()
    engine.create_adapter("a", spec(engine))
    return engine
