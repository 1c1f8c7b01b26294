"""The cluster that some of these tests install into, and the Prometheus that reads the chart's alerts."""

from __future__ import annotations

import pytest
from support.kubernetes import fixtures
from support.kubernetes.fixtures import api_cluster, namespace
from support.kubernetes.prometheus import build_when_used, prometheus

__all__ = ["api_cluster", "namespace", "prometheus", "pytest_collection_finish"]


def pytest_collection_finish(session: pytest.Session) -> None:
    fixtures.pytest_collection_finish(session)
    build_when_used(session)
