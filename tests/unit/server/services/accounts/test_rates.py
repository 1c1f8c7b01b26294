"""A key's rate per minute, and the time of its next permitted request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from tinsmith_server.errors import TooBusy
from tinsmith_server.services.accounts.rates import Rate, Rates


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(rate: Rate, key: str = "key") -> TooBusy:
    with pytest.raises(TooBusy) as caught:
        rate.admit(key)
    return caught.value


def test_a_key_has_a_minutes_worth_and_gets_it_back_evenly() -> None:
    clock = Clock()
    rate = Rate("things", "setting some_setting", 60, clock)
    for _ in range(60):
        rate.admit("key")
        rate.charge("key", 1)
    error = refused(rate)
    assert "60 things a minute (setting some_setting); retry in 1 s" in str(error)
    assert error.retry_after_seconds == pytest.approx(1)
    clock.now += 1
    rate.admit("key")


def test_one_large_call_is_admitted_and_delays_later_ones_less_than_the_sdk_waits() -> None:
    clock = Clock()
    rate = Rate("tokens", "setting", 1000, clock)
    rate.charge("key", 10**9)
    assert refused(rate).retry_after_seconds == 60
    clock.now += 241
    rate.admit("key")


async def test_a_short_debt_is_waited_for_and_a_long_one_refused() -> None:
    rate = Rate("tokens", "setting", 60_000)
    rate.charge("key", 60_020)
    await rate.admit_late("key")
    rate.charge("key", 10**6)
    with pytest.raises(TooBusy):
        await rate.admit_late("key")


def test_a_result_that_is_read_again_is_counted_once() -> None:
    rates = Rates(None, None, 100)
    for _ in range(3):
        rates.note_sampled("key", "a:asample:1", 60)
    rates.sampled.admit("key")
    rates.note_sampled("key", "a:asample:2", 60)
    refused(rates.sampled)
