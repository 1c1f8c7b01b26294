"""What every test run shares: a summary that says what was left out, and what to install for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

UNIT_SECONDS = 30
UNIT_FOLDER = Path(__file__).parent / "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A unit test that takes this long hangs, or is no unit test."""
    for item in items:
        if item.path.is_relative_to(UNIT_FOLDER) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(UNIT_SECONDS))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if not reasons:
        return
    terminalreporter.section("left out on this machine")
    for reason, count in reasons.most_common():
        terminalreporter.line(f"{count:4} tests: {reason}")


def _reason(report: pytest.TestReport) -> str:
    """A skip's `longrepr` is (path, line, reason)."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
