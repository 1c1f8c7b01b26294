from __future__ import annotations

import threading

import pytest
from tinsmith_trainer.torch_model.device import DeviceTurn


def line_up(turn: DeviceTurn, names: str, served: list[str]) -> list[threading.Thread]:
    """Threads that ask in the order of their names, each seen waiting before the next asks."""
    threads = []
    for number, name in enumerate(names, start=turn.waiting + 1):
        threads.append(threading.Thread(target=_serve, args=(turn, name, served)))
        threads[-1].start()
        while turn.waiting < number:
            threads[-1].join(0.001)
    return threads


def _serve(turn: DeviceTurn, name: str, served: list[str]) -> None:
    with turn.taken():
        served.append(name)


def test_who_asked_first_is_served_first() -> None:
    turn, served = DeviceTurn(), list[str]()
    with turn.taken():
        threads = line_up(turn, "abcd", served)
        assert served == []
    for thread in threads:
        thread.join()
    assert served == ["a", "b", "c", "d"]


def test_the_thread_that_asks_again_at_once_waits_behind_the_others() -> None:
    turn, served = DeviceTurn(), list[str]()
    with turn.taken():
        threads = line_up(turn, "a", served)
    with turn.taken():
        served.append("again")
    threads[0].join()
    assert served == ["a", "again"]


def test_an_error_passes_the_turn_on() -> None:
    turn, served = DeviceTurn(), list[str]()
    with pytest.raises(ZeroDivisionError), turn.taken():
        _ = 1 / 0
    _serve(turn, "next", served)
    assert served == ["next"]
