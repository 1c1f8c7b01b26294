"""An operator and an API server whose clocks differ: certificates begin by the earlier one, and it is said."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any, cast

import pytest
import structlog
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st
from support.operator.fake_cluster import FakeCluster
from tinsmith_operator.ca.issuer import Issuer
from tinsmith_operator.kube.server_clock import TOLERATED, ServerClock, least_offset

LOCAL = datetime(2026, 2, 1, 12, 0, 0, 400_000, tzinfo=UTC)
HOURS = timedelta(hours=2)


def clock_with(offset: timedelta, taking: timedelta = timedelta(seconds=0.1)) -> ServerClock:
    """Return a clock that has seen one answer of an API server that is ahead by this much."""
    clock = ServerClock(lambda: LOCAL)
    clock.note(format_datetime((LOCAL + offset).replace(microsecond=0), usegmt=True), LOCAL - taking)
    return clock


@given(
    offset=st.timedeltas(-timedelta(days=60), timedelta(days=60)),
    taking=st.timedeltas(timedelta(), timedelta(minutes=2)),
    written=st.floats(0, 1),
)
def test_an_offset_is_never_overstated_however_long_an_answer_takes(
    offset: timedelta, taking: timedelta, written: float
) -> None:
    """The answer is written at some moment in between, and its Date has whole seconds."""
    sent = LOCAL - taking
    date = (sent + taking * written + offset).replace(microsecond=0)
    least = least_offset(date, sent, LOCAL)
    assert abs(least) <= abs(offset)
    assert abs(offset - least) <= taking + timedelta(seconds=1)


@pytest.mark.parametrize("offset", [-HOURS, HOURS, timedelta(days=-40)], ids=["ahead", "behind", "far ahead"])
async def test_a_certificate_begins_and_ends_in_time_by_both_clocks(offset: timedelta) -> None:
    clock, cluster = clock_with(offset), FakeCluster()
    names: Any = {"namespace": "tin", "release": "r", "authority_secret": "ca", "api_server_secret": "client"}
    issuer = Issuer(cast(Any, cluster), **names, clock=clock.now)
    await issuer.refresh()
    leaf = x509.load_pem_x509_certificate(issuer.issue_for_worker(("w.worker.tinsmith.internal",)).certificate)
    for now in (LOCAL, LOCAL + offset):
        assert leaf.not_valid_before_utc <= now or now > LOCAL
        assert issuer.authority.certificate.not_valid_before_utc <= now
    assert leaf.not_valid_before_utc <= min(LOCAL, LOCAL + offset)


@pytest.mark.parametrize(("offset", "way"), [(-HOURS, "ahead of"), (HOURS, "behind")])
def test_clocks_that_differ_are_logged_once_with_the_cure(offset: timedelta, way: str) -> None:
    with structlog.testing.capture_logs() as logs:
        clock = clock_with(offset)
        clock.note(format_datetime(LOCAL + offset, usegmt=True), LOCAL)
    assert clock.problem is not None
    assert f"s {way} the API server's" in clock.problem
    assert "NTP" in clock.problem
    assert [entry["event"] for entry in logs] == ["clocks differ"]


@pytest.mark.parametrize("seconds", [0, 30, -30])
def test_a_difference_that_backdating_covers_is_no_trouble(seconds: int) -> None:
    clock = clock_with(timedelta(seconds=seconds))
    assert clock.problem is None
    assert clock.now() == LOCAL
    assert timedelta(seconds=abs(seconds)) < TOLERATED


@pytest.mark.parametrize("offset", [timedelta(seconds=-80), timedelta(seconds=80)], ids=["ahead", "behind"])
def test_a_slow_answer_takes_back_nothing_that_a_quick_one_proved_and_another_quick_one_does(offset: timedelta) -> None:
    clock = clock_with(offset)
    before = clock.offset_seconds
    taking = timedelta(seconds=30)
    for written in (timedelta(), taking):
        clock.note(format_datetime(LOCAL - taking + written + offset, usegmt=True), LOCAL - taking)
        assert abs(clock.offset_seconds) >= abs(before)
    clock.note(format_datetime(LOCAL, usegmt=True), LOCAL)
    assert clock.problem is None


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_an_answer_without_a_date_says_nothing(date: str | None) -> None:
    clock = clock_with(-HOURS)
    clock.note(date, LOCAL)
    assert clock.problem is not None
