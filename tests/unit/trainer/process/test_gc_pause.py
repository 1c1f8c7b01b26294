"""The collector rests while modules are imported, and what is there then is behind it for good."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from tinsmith_trainer.process import gc_pause


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_modules_are_imported() -> None:
    with gc_pause():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_existing_objects_are_never_scanned_again() -> None:
    with gc_pause():
        imported: list[object] = [[]]
    assert gc.get_freeze_count() > 0
    assert not any(one is imported for one in gc.get_objects())


def test_an_import_that_fails_leaves_the_collector_at_work() -> None:
    with pytest.raises(ModuleNotFoundError), gc_pause():
        raise ModuleNotFoundError
    assert gc.isenabled()
