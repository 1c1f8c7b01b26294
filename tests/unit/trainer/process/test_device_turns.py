"""Training and sampling share a device by time: neither waits for more than the other's turn and a credit.

Clocks are simulated, and only the holder of the device moves a clock.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinsmith_trainer.process.device_turns import DeviceTurns, TimeShares, Use

CREDIT = 0.05
LAYER, STEP = 0.007, 0.025
"""Seconds of a layer with 4,096 tokens and of a decode step, both of an 8B model."""
LAYERS = 60
SECONDS = st.floats(0.002, 0.5)


def serve(turns: DeviceTurns, use: Use, name: str, served: list[str]) -> None:
    with turns.held(use):
        served.append(name)


def line_up(turns: DeviceTurns, use: Use, names: str, served: list[str]) -> list[threading.Thread]:
    """Threads that ask in the order of their names, each seen waiting before the next asks."""
    threads = []
    for number, name in enumerate(names, start=turns.waiting + 1):
        threads.append(threading.Thread(target=serve, args=(turns, use, name, served)))
        threads[-1].start()
        while turns.waiting < number:
            threads[-1].join(0.001)
    return threads


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Simulation:
    """A microbatch of training, whose layers take `layer` seconds, and a sampler that always has a next step."""

    shares: TimeShares
    layer: float
    step: float
    spent: dict[Use, float] = field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    waits: list[float] = field(default_factory=list)
    waited: float = 0.0

    def run(self) -> None:
        """Run until each use has had ten of the longer turns."""
        while min(self.spent.values()) < 10 * max(self.layer, self.step):
            self._charge(Use.TRAINING, self.layer)
            self.waited += self.layer
            while self.shares.is_due(Use.SAMPLING):
                self.waits.append(self.waited)
                self.waited = 0.0
                self._charge(Use.SAMPLING, self.step)
                if self.shares.next_use([Use.TRAINING, Use.SAMPLING], Use.TRAINING) is Use.TRAINING:
                    break

    def _charge(self, use: Use, seconds: float) -> None:
        self.shares.charge(use, seconds)
        self.spent[use] += seconds


@given(layer=SECONDS, step=SECONDS)
def test_a_decode_step_waits_for_a_step_of_its_own_length_and_a_layer(layer: float, step: float) -> None:
    simulation = Simulation(TimeShares(CREDIT), layer, step)
    simulation.run()
    assert max(simulation.waits) <= max(CREDIT, step) + 2 * layer + 1e-9


@given(layer=SECONDS, step=SECONDS)
def test_training_and_sampling_get_the_same_time(layer: float, step: float) -> None:
    simulation = Simulation(TimeShares(CREDIT), layer, step)
    simulation.run()
    apart = abs(simulation.spent[Use.TRAINING] - simulation.spent[Use.SAMPLING])
    assert apart <= 2 * (layer + step + CREDIT)


@given(st.lists(st.tuples(st.sampled_from(Use), SECONDS), max_size=100))
def test_a_use_that_waited_long_gets_the_time_of_one_turn_and_not_of_all(turns: list[tuple[Use, float]]) -> None:
    shares = TimeShares(CREDIT)
    for use, seconds in turns:
        shares.charge(use, seconds)
    assert abs(shares.lead_seconds) <= max([CREDIT, *(seconds for _, seconds in turns)])


def test_threads_of_one_use_are_served_in_the_order_of_their_requests() -> None:
    turns, served = DeviceTurns(), list[str]()
    with turns.held(Use.TRAINING):
        threads = line_up(turns, Use.SAMPLING, "abcd", served)
        assert served == []
    for thread in threads:
        thread.join()
    assert served == ["a", "b", "c", "d"]


@pytest.mark.parametrize("use", Use)
def test_the_thread_that_asks_again_at_once_waits_behind_the_others(use: Use) -> None:
    turns, served = DeviceTurns(), list[str]()
    with turns.held(Use.TRAINING):
        threads = line_up(turns, use, "a", served)
    with turns.held(Use.TRAINING):
        served.append("again")
    threads[0].join()
    assert served == ["a", "again"]


def test_an_error_ends_the_turn() -> None:
    turns, served = DeviceTurns(), list[str]()
    with pytest.raises(ZeroDivisionError), turns.held(Use.TRAINING):
        _ = 1 / 0
    serve(turns, Use.SAMPLING, "next", served)
    assert served == ["next"]


def sampled_during(act: Callable[[DeviceTurns, Clock], None]) -> list[str]:
    """Return what a sampler and the engine did, when a turn of training does `act` while the sampler waits."""
    clock, served = Clock(), list[str]()
    turns = DeviceTurns(clock, CREDIT)
    with turns.held(Use.TRAINING):
        threads = line_up(turns, Use.SAMPLING, "s", served)
        act(turns, clock)
        served.append("end of the turn")
    threads[0].join()
    return served


def test_a_waiting_sampler_has_its_turn_in_the_middle_of_a_microbatch() -> None:
    def a_layer(turns: DeviceTurns, clock: Clock) -> None:
        clock.now += LAYER
        turns.offer()

    assert sampled_during(a_layer) == ["s", "end of the turn"]


def test_time_in_which_a_microbatch_waits_for_a_sampler_is_known() -> None:
    clock = Clock()
    turns = DeviceTurns(clock, CREDIT)

    def step() -> None:
        with turns.held(Use.SAMPLING):
            clock.now += STEP

    sampler = threading.Thread(target=step)
    with turns.held(Use.TRAINING):
        sampler.start()
        while not turns.waiting:
            sampler.join(0.001)
        clock.now += LAYER
        turns.offer()
    sampler.join()
    assert turns.waited_seconds == {Use.TRAINING: STEP, Use.SAMPLING: LAYER}


def test_a_sampler_that_had_more_time_waits_between_layers_until_training_has_caught_up() -> None:
    clock = Clock()
    turns, layer, steps = DeviceTurns(clock, CREDIT), 0, list[int]()

    def step() -> None:
        with turns.held(Use.SAMPLING):
            steps.append(layer)
            clock.now += STEP

    sampler = threading.Thread(target=step)
    with turns.held(Use.TRAINING):
        for layer in range(LAYERS):  # noqa: B007 - read by the sampler
            if not turns.waiting:
                sampler = threading.Thread(target=step)
                sampler.start()
                while not turns.waiting:
                    sampler.join(0.001)
            clock.now += LAYER
            turns.offer()
        between = {later - earlier for earlier, later in itertools.pairwise(steps)}
    sampler.join()
    assert between == {3, 4}


def test_a_turn_of_sampling_is_never_interrupted() -> None:
    turns, served = DeviceTurns(), list[str]()
    with turns.held(Use.SAMPLING):
        threads = line_up(turns, Use.TRAINING, "t", served)
        turns.offer()
        assert served == []
    threads[0].join()


def test_an_interrupted_microbatch_continues_before_other_calls_of_the_engine() -> None:
    turns, served = DeviceTurns(), list[str]()
    with turns.held(Use.TRAINING):
        threads = [*line_up(turns, Use.TRAINING, "t", served), *line_up(turns, Use.SAMPLING, "s", served)]
        turns.offer()
        served.append("the microbatch")
    for thread in threads:
        thread.join()
    assert served == ["s", "the microbatch", "t"]
