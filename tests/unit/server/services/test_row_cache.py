"""A cache by time."""

from __future__ import annotations

from tinsmith_server.services.rows import RowCache


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_row_is_kept_for_its_time_and_no_longer() -> None:
    clock = Clock()
    cache: RowCache[str, int] = RowCache(seconds=2.0, clock=clock)
    cache.put("a", 1)
    assert (cache.get("a"), cache.get("b")) == (1, None)
    clock.now += 2.0
    assert cache.get("a") is None


def test_a_cache_never_grows_over_its_limit() -> None:
    cache: RowCache[int, int] = RowCache(seconds=100.0, entries=3)
    for key in range(10):
        cache.put(key, key)
    assert sum(cache.get(key) is not None for key in range(10)) <= 3
    assert cache.get(9) == 9
