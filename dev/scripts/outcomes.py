"""A pytest plugin that writes the outcome of each test immediately.

An interrupted run thus keeps the results of all ended tests.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from run_results import FILE


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests into the order of the arguments.

    Pytest itself merges arguments that contain other arguments.
    """
    asked = config.args
    items.sort(key=lambda item: next((at for at, name in enumerate(asked) if item.nodeid.startswith(name)), len(asked)))


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder, but not in a worker of pytest-xdist, whose reports the main process gets, too."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder())


class Recorder:
    """The hooks that write outcomes."""

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a failure for all tests of a module that cannot be imported."""
        if report.failed:
            _write(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test.

        A test has passed if the call passed. A test has failed or was skipped if any phase failed or was skipped.
        """
        if report.when == "call" or report.outcome != "passed":
            _write(report)


def _write(report: pytest.TestReport | pytest.CollectReport) -> None:
    line = {"test": report.nodeid, "outcome": report.outcome, "reason": reason_of(report)}
    with Path(os.environ[FILE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = [line.strip() for line in (crash.message if crash is not None else report.longreprtext).splitlines()]
    # If a worker of pytest-xdist crashes, the first line is a description of the worker, with paths of the machine.
    lines = [line for line in lines if not line.startswith("[gw")]
    # If a module cannot be imported, the error itself comes last, in the form in which pytest marks exceptions.
    raised = [line.removeprefix("E ").strip() for line in lines if line.startswith("E ")]
    return next((line for line in [*raised[-1:], *lines] if line), "no words")
