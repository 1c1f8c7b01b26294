"""Download links: what is signed, and what no longer counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.services.checkpoints.download_links import sign, verify

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
SECRET = bytes(32)


@given(st.text(min_size=1, max_size=80))
def test_a_link_opens_its_directory_until_its_end(directory: str) -> None:
    token = sign(SECRET, directory, LATER)
    assert "/" not in token
    assert verify(SECRET, token, NOW) == directory
    assert verify(SECRET, token, LATER) is None


def test_a_link_of_another_installation_opens_nothing() -> None:
    assert verify(bytes(31) + b"x", sign(SECRET, "a", LATER), NOW) is None


def test_a_link_does_not_open_another_directory_or_live_longer() -> None:
    own, others = sign(SECRET, "runs/1", LATER), (sign(SECRET, "runs/2", LATER), sign(SECRET, "runs/1", NOW))
    for other in others:
        assert verify(SECRET, f"{other.split('.')[0]}.{own.split('.')[1]}", NOW - timedelta(hours=1)) is None


@given(st.text(max_size=60))
def test_no_text_breaks_the_check(token: str) -> None:
    assert verify(SECRET, token, NOW) is None
