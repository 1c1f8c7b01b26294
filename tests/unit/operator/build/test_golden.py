"""What is built, whole. That an API server takes it is tested in tests/cluster/crd/."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.operator.built_pools import BUILT_POOLS, BuiltPool
from support.operator.built_sessions import BUILT, Built

GOLDEN = {**BUILT, **BUILT_POOLS}


@pytest.mark.parametrize(("name", "built"), GOLDEN.items(), ids=GOLDEN)
def test_the_objects_of_a_session_or_pool_are_as_reviewed(name: str, built: Built | BuiltPool) -> None:
    assert_golden(Path(__file__).parent / "golden" / f"{name}.yaml", built.objects())


WRITES = os.environ.get("TINSMITH_GOLDEN") == "write"


class _Plain(yaml.SafeDumper):
    """Without anchors, which nobody writes by hand."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def assert_golden(file: Path, documents: list[dict[str, Any]]) -> None:
    """The documents are those of the file. With TINSMITH_GOLDEN=write, they become it."""
    text = yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=120)
    if WRITES:
        file.write_text(text)
    assert file.exists(), f"{file.name} is not there: `make golden` writes it"
    assert text == file.read_text(), (
        f"{file.name} is not what is built; if the change is meant, `make golden` writes it"
    )
