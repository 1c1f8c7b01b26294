from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from support.nemo_rl.fakes import ACTOR_ENVIRONMENT_REGISTRY, Policy, RayVirtualCluster, fake_modules


@pytest.fixture
def fake_nemo_rl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """NeMo RL and Megatron-Bridge as `tests/support/nemo_rl` has them, for one test."""
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "tinsmith_trainer.engines.nemo_rl.actor", raising=False)
    yield
    sys.modules.pop("tinsmith_trainer.engines.nemo_rl.actor", None)
    ACTOR_ENVIRONMENT_REGISTRY.clear()
    Policy.created.clear()
    RayVirtualCluster.created.clear()
