"""Tests that need a real Kubernetes: bare/ looks at the clusters themselves."""

from support.cluster_fixtures import (
    api_cluster,
    fresh_cluster,
    namespace,
    node_cluster,
    pytest_collection_finish,
    pytest_runtest_makereport,
    two_node_cluster,
)

__all__ = [
    "api_cluster",
    "fresh_cluster",
    "namespace",
    "node_cluster",
    "pytest_collection_finish",
    "pytest_runtest_makereport",
    "two_node_cluster",
]
