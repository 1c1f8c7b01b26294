"""What a test needs of the machine: where it is missing the test is skipped, or fails where all is promised."""

from __future__ import annotations

import os

import pytest

REQUIRE_ALL = "TINSMITH_REQUIRE_ALL"


def require(condition: bool, sentence: str) -> None:
    """Skips the test unless `condition`; with TINSMITH_REQUIRE_ALL=1, fails it.

    `sentence` says what is missing and which command installs it.
    """
    if condition:
        return
    if os.environ.get(REQUIRE_ALL) == "1":
        pytest.fail(f"{sentence} ({REQUIRE_ALL}=1 asks for every test)")
    pytest.skip(sentence)
