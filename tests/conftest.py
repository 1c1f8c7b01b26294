"""What every test run shares: a summary that says what was left out, and what to install for it."""

from __future__ import annotations

from collections import Counter

import pytest


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
