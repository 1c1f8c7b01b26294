from __future__ import annotations

import threading

import pytest
from tinsmith_trainer.torch_model.device import DeviceLock


def line_up(lock: DeviceLock, names: str, served: list[str]) -> list[threading.Thread]:
    """Threads that ask in the order of their names, each seen waiting before the next asks."""
    threads = []
    for number, name in enumerate(names, start=lock.waiting + 1):
        threads.append(threading.Thread(target=_serve, args=(lock, name, served)))
        threads[-1].start()
        while lock.waiting < number:
            threads[-1].join(0.001)
    return threads


def _serve(lock: DeviceLock, name: str, served: list[str]) -> None:
    with lock.held():
        served.append(name)


def test_the_first_waiter_is_served_first() -> None:
    lock, served = DeviceLock(), list[str]()
    with lock.held():
        threads = line_up(lock, "abcd", served)
        assert served == []
    for thread in threads:
        thread.join()
    assert served == ["a", "b", "c", "d"]


def test_the_thread_that_asks_again_at_once_waits_behind_the_others() -> None:
    lock, served = DeviceLock(), list[str]()
    with lock.held():
        threads = line_up(lock, "a", served)
    with lock.held():
        served.append("again")
    threads[0].join()
    assert served == ["a", "again"]


def test_an_error_releases_the_lock() -> None:
    lock, served = DeviceLock(), list[str]()
    with pytest.raises(ZeroDivisionError), lock.held():
        _ = 1 / 0
    _serve(lock, "next", served)
    assert served == ["next"]
