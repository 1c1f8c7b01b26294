"""The parts of every test run: a place for temporary files, and a summary of skips, leftovers and times."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import settings
from support.selection import (
    LANES,
    LEFT_OUT,
    NOT_ASKED_FOR,
    PROCESSOR_SECONDS,
    PYTORCH,
    QUICK,
    commands,
    count_tests,
    folders_of,
    holds_no_quick_test,
    is_quick,
    is_unit,
    lacks_pytorch,
    lane_of,
    left_out_by_folder,
    processor_seconds,
)
from support.temporary_files import LAST_OF_ALL, OwnPlace

if TYPE_CHECKING:
    from support.token_server.shared import SharedServer

# Hypothesis' own limit is 0.2 s an example: on a busy machine it fails a test that has nothing wrong.
settings.register_profile("unhurried", settings(), deadline=None)
settings.load_profile("unhurried")

# A shell has a run in the background ignore Ctrl-C, and so would every program that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before anything imports PyTorch. Its threads spin while they wait for each other: where several lanes share two cores,
# two threads took five times the CPU of one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Until the tests are collected: the collector would scan all imported modules again and again.
gc.disable()

# structlog's own default shows the local variables of every frame, which other threads change while it reads them: no
# program of ours logs like that.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.format_exc_info,
        structlog.dev.ConsoleRenderer(colors=False),
    ]
)

# The fast ones take milliseconds; some start programs, on a machine that others keep busy.
UNIT_SECONDS = 120
TESTS = Path(__file__).parent
# The first test of a cluster waits until it is there, and the last until it is gone.
CLUSTER_SECONDS = 1200
CLUSTER_FOLDERS = (TESTS / "cluster" / "bare", TESTS / "cluster" / "node")
# cluster/operator and cluster/node differ as much as unit and contract do.
SPLIT_LAYERS = {"cluster", "contract"}

_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()
_not_asked_for: Counter[str] = Counter()
_quick_functions: set[str] = set()
_MOST_NAMED = 20
_own_place = pytest.StashKey[OwnPlace]()
_left_behind = pytest.StashKey[list[str]]()
_LEFT_BEHIND = "left_behind"
_ended: list[pytest.Session] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=sorted(set(LANES.values())), help="run the tests of the make target test-LANE")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_own_place] = OwnPlace.take()
    if (lane := config.getoption("lane")) is not None:
        config.args = [str(folder) for folder in folders_of(lane)]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Collect garbage from now on, but never scan what has been imported."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report temporary files that were left, after all fixtures have ended.

    A process of pytest-xdist sends the names to the process that reports.
    """
    left = session.config.stash[_own_place].left()
    session.config.stash.setdefault(_left_behind, []).extend(left)
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_LEFT_BEHIND] = left
    _ended.append(session)


def _leave_modules() -> None:
    """Exit without unloading the modules, as a worker does: PyTorch takes seconds to unload."""
    for session in _ended:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(session.exitstatus)


# Behind all else that ends with the process, such as the place of temporary files.
Finalize(None, _leave_modules, exitpriority=LAST_OF_ALL)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(_left_behind, []).extend(getattr(node, "workeroutput", {}).get(_LEFT_BEHIND, []))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_own_place].give_up()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if lacks_pytorch(collection_path):
        _not_asked_for[PYTORCH] += count_tests(collection_path)
        return True
    if (lane := config.getoption("lane")) is not None and lane_of(collection_path) != lane:
        return True
    return True if _only_quick(config) and holds_no_quick_test(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound the time of a unit test: one that takes longer hangs, or is no unit test."""
    for item in items:
        if (seconds := _time_limit(item)) is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(seconds))
        if is_quick(item):
            item.add_marker(QUICK)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = processor_seconds()
    yield
    spent = processor_seconds() - before
    if spent > PROCESSOR_SECONDS and is_unit(item) and item.get_closest_marker("slow") is None:
        pytest.fail(
            f"{item.name} used {spent:.1f} s of processor, and a unit test may use {PROCESSOR_SECONDS:.0f}: "
            "make it faster, or mark it `slow` with the reason."
        )


def _only_quick(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == QUICK)


def _time_limit(item: pytest.Item) -> int | None:
    """Return the time limit of the test's folder, where it has one."""
    if is_unit(item):
        return UNIT_SECONDS
    return CLUSTER_SECONDS if any(item.path.is_relative_to(folder) for folder in CLUSTER_FOLDERS) else None


@pytest.fixture(scope="session")
def real_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    """One for the whole run: a start takes a minute. Other Pythons, which have no PyTorch, never come here."""
    from support.token_server.real_vllm import start_real_vllm

    server = start_real_vllm(tmp_path_factory.mktemp("vllm"))
    yield server
    server.close()


def pytest_deselected(items: list[pytest.Item]) -> None:
    _not_asked_for.update(mark for item in items for mark in NOT_ASKED_FOR if item.get_closest_marker(mark))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _quick_functions.add(report.nodeid.split("[", maxsplit=1)[0])
    layer = _layer(report.nodeid)
    _seconds[layer] += report.duration
    _tests[layer] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(_left_behind, []):
        terminalreporter.section("temporary files were left behind: the test that makes them must remove them")
        for path in left[:_MOST_NAMED]:
            terminalreporter.line(path)
        terminalreporter.line(f"{len(left)} in all")
    if len(_seconds) > 1:
        terminalreporter.section("time per layer")
        for layer, seconds in _seconds.most_common():
            terminalreporter.line(f"{seconds:6.0f} s  {_tests[layer]:5} tests  {layer}")
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    reasons.update({LEFT_OUT[mark]: count for mark, count in _not_asked_for.items()})
    if reasons and not _only_quick(config):
        terminalreporter.section("left out on this machine")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count:4} tests: {reason}")
    if _only_quick(config):
        _summarize_quick(terminalreporter)


def _summarize_quick(terminalreporter: pytest.TerminalReporter) -> None:
    ran = Counter(name.removeprefix(f"{TESTS.name}/").split("/", maxsplit=1)[0] for name in _quick_functions)
    terminalreporter.section(f"{ran.total():,} promises checked, in {_tests.total():,} tests; left out")
    for folder, count in left_out_by_folder(ran).most_common():
        terminalreporter.line(f"{count:5} promises of tests/{folder}: {commands(folder)}")
    terminalreporter.line("`make test-all` runs all that this machine can.")


def _layer(nodeid: str) -> str:
    """`tests/sdk/test_x.py::test_y` belongs to `sdk`."""
    folders = nodeid.split("::", maxsplit=1)[0].split("/")[:-1]
    below = folders[1:] if folders[:1] == [TESTS.name] else folders
    return "/".join(below[: 2 if below[:1] and below[0] in SPLIT_LAYERS else 1]) or TESTS.name


def _reason(report: pytest.TestReport) -> str:
    """Return a skip's reason. Its `longrepr` is (path, line, reason)."""
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
