"""Environments of the SDK's generations: what is the same for all comes from the lock, and PyTorch from one of them."""

from __future__ import annotations

from sdk_environments import LOCK, without_sdk
from sdk_generations import GENERATIONS, TESTED


def test_the_lock_keeps_all_but_the_sdk() -> None:
    lock, kept = LOCK.read_text(), without_sdk(LOCK.read_text())
    assert "\ntinker==" in lock
    assert "\ntinker" not in kept
    assert "\npydantic==" in kept
    assert lock.startswith(kept[:1000])


def test_generations_name_versions_once_oldest_first() -> None:
    numbers = [tuple(map(int, version.split("."))) for version in TESTED]
    assert numbers == sorted(set(numbers))
    assert all(generation.tested for generation in GENERATIONS)
