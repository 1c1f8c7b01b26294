"""The reference engine behind gates that a test opens: loading waits at one, each microbatch at another.

A gate is a FIFO in the folder that `TINSMITH_TEST_GATES` names. The engine passes it when a test opens it for writing;
where it does not exist, there is no gate. A file of the same name with `.reached` shows that the engine arrived at the
gate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.engine.reference import ReferenceEngine
from tinsmith_trainer.engines.base import Call
from typing_extensions import override

FOLDER_VARIABLE = "TINSMITH_TEST_GATES"
SEED_VARIABLE = "TINSMITH_TEST_SEED"
LOADING, COMPUTING = "loading", "computing"


class GatedEngine(ReferenceEngine):
    @override
    def advance(self, calls: Sequence[Call]) -> None:
        _pass(COMPUTING)
        super().advance(calls)


def build_gated(options: Any) -> tuple[GatedEngine, None]:
    _pass(LOADING)
    seed = int(os.environ.get(SEED_VARIABLE, "0"))
    return GatedEngine(options.model, options.adapter_slots, min(options.max_rank, 16), seed), None


def _pass(gate: str) -> None:
    path = Path(os.environ[FOLDER_VARIABLE]) / gate
    if path.exists():
        reached(path).touch()
        path.read_bytes()


def reached(gate: Path) -> Path:
    return gate.with_name(f"{gate.name}.reached")
