"""Prometheus's own parser and engine, for alerts and dashboards. A conftest imports the fixture `prometheus`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.requirements import require
from testcluster.programs.builds import GO_MISSING, PROMQL, built

INTERVAL_SECONDS = 60


@dataclass(frozen=True)
class Sample:
    labels: dict[str, str]
    value: float


@dataclass(frozen=True)
class Selector:
    """The series of a metric that an expression reads: the labels that choose them, with their values."""

    metric: str
    matchers: dict[str, str]


@dataclass(frozen=True)
class Answer:
    selectors: list[Selector]
    samples: list[Sample]


class Refused(Exception):
    """Prometheus does not take a rule or an expression; the message is its own."""


@dataclass(frozen=True)
class Prometheus:
    program: Path

    def check_rules(self, groups: Sequence[Any]) -> None:
        """Check the rules. Raises Refused, also for a template in an annotation."""
        self._ask(rules={"groups": groups}, series=[], expressions=[], at_seconds=0)

    def evaluate(self, expressions: Sequence[str], series: Sequence[str] = (), at_seconds: int = 0) -> list[Answer]:
        """Return what each expression reads and gives at that time.

        Series are such as `up{job="a"} 1 0x5`, with one value for each minute. Raises Refused.
        """
        found = self._ask(rules=None, series=series, expressions=expressions, at_seconds=at_seconds)
        return [
            Answer(
                [Selector(**selector) for selector in each["selectors"]],
                [Sample(**sample) for sample in each["samples"]],
            )
            for each in found
        ]

    def _ask(self, **question: Any) -> Any:
        asked = json.dumps({**question, "interval_seconds": INTERVAL_SECONDS})
        done = subprocess.run([str(self.program)], input=asked, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Refused(done.stderr.strip())
        return json.loads(done.stdout)


@pytest.fixture(scope="session")
def prometheus() -> Prometheus:
    require(PROMQL.folder().is_dir() or shutil.which("go") is not None, GO_MISSING)
    return Prometheus(built(PROMQL) / "promql")


def build_when_used(session: pytest.Session) -> None:
    """Build Prometheus in a conftest's pytest_collection_finish, so that no test is charged for it."""
    uses = any("prometheus" in getattr(item, "fixturenames", ()) for item in session.items)
    if not uses or session.config.option.collectonly or shutil.which("go") is None:
        return
    with session.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        built(PROMQL)
