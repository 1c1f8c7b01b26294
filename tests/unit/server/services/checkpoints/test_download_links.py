"""Download links: what is signed, and what no longer counts."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from tinsmith_server.services.checkpoints.download_links import sign, verify

NOW = datetime(2030, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(hours=1)
SECRET = bytes(32)


def test_a_link_of_another_installation_opens_nothing() -> None:
    assert verify(bytes(31) + b"x", sign(SECRET, "a", LATER), NOW) is None


@given(st.text(max_size=60))
def test_no_text_breaks_the_check(token: str) -> None:
    assert verify(SECRET, token, NOW) is None
