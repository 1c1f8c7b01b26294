"""Names that both the plugin and the operator write, compared here because the packages do not import each other."""

from __future__ import annotations

from tinsmith.cluster import families as names
from tinsmith.cluster.families import Kind
from tinsmith.cluster.requests import SUSPENDED
from tinsmith_operator.api import names as operators
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.common.workloads import WORKLOAD_KINDS
from tinsmith_operator.kube.resources import POOLS, SESSIONS


def test_the_plugin_and_the_operator_call_things_alike() -> None:
    assert (names.GROUP, names.MANAGED_BY_LABEL, names.OPERATOR) == (
        operators.GROUP,
        operators.MANAGED_BY_LABEL,
        operators.MANAGER,
    )
    assert (Kind.SESSION.label, Kind.POOL.label) == (operators.SESSION_LABEL, operators.POOL_LABEL)
    assert (names.SNAPSHOT_REQUEST, names.RESTART_REQUEST) == (
        operators.SNAPSHOT_REQUEST_ANNOTATION,
        operators.RESTART_REQUEST_ANNOTATION,
    )
    assert SUSPENDED == Reason.SUSPENDED
    assert names.MEMBER_APPLICATION == operators.MEMBER_APPLICATION
    assert names.CONVERSION_APPLICATION == operators.CONVERSION_APPLICATION


def test_the_plugin_knows_the_operators_kinds() -> None:
    for kind, resource in ((Kind.SESSION, SESSIONS), (Kind.POOL, POOLS)):
        assert (kind.kind, kind.resource) == (resource.kind, f"{resource.plural}.{operators.GROUP}")
    assert (Kind.SESSION.workloads, Kind.POOL.workloads) == (WORKLOAD_KINDS, {"Deployment"})
