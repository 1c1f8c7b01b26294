from __future__ import annotations

from datetime import UTC, datetime

import aiohttp
from tinsmith_operator.kube.resources import ApiCall
from tinsmith_operator.metrics import Metrics
from tinsmith_operator.runtime.health import HealthServer


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as response:
        return response.status, await response.text()


async def test_health_says_what_is_missing() -> None:
    state: dict[str, str | None] = {"dead": None, "missing": "not listed yet: pods"}
    server = HealthServer(0, 0, lambda: state["dead"], lambda: state["missing"], lambda: b"")
    async with server:
        assert await get(server.health_port, "/healthz") == (200, "ok")
        assert await get(server.health_port, "/readyz") == (503, "not listed yet: pods")
        state.update(dead="the watch has ended", missing=None)
        assert await get(server.health_port, "/healthz") == (503, "the watch has ended")
        assert await get(server.health_port, "/readyz") == (200, "ok")


async def test_a_ready_operator_still_reports_missing_rights() -> None:
    forbidden = ["The operator does nothing in namespace b."]
    server = HealthServer(0, 0, lambda: None, lambda: None, lambda: b"", remarks=lambda: forbidden)
    async with server:
        assert await get(server.health_port, "/readyz") == (200, "ok\nThe operator does nothing in namespace b.")
        assert await get(server.health_port, "/healthz") == (200, "ok")


async def test_metrics_are_on_a_port_of_their_own() -> None:
    metrics = Metrics()
    server = HealthServer(0, 0, lambda: None, lambda: None, metrics.render)
    async with server:
        assert (await get(server.health_port, "/metrics"))[0] == 404
        status, page = await get(server.metrics_port, "/metrics")
    assert status == 200
    assert "tinsmith_operator_reconcile_seconds_count 0.0" in page


def test_metrics_tell_of_requests_conditions_and_certificates() -> None:
    metrics = Metrics()
    metrics.note_request(ApiCall("create", "pods", None), "201")
    condition = {"type": "Ready", "status": "True", "reason": "Serving"}
    place = {"kind": "SamplerPool", "metadata": {"namespace": "tin", "name": "tiny"}, "spec": {"replicas": 1}}
    told = {**place, "status": {"conditions": [condition]}}
    end = datetime(2026, 3, 1, tzinfo=UTC)
    metrics.watch(
        lambda: 3,
        lambda: True,
        lambda: [told, told, place],
        lambda: [("tin", "tiny-tls", end), ("ten", "tiny-tls", end)],
        lambda: False,
        lambda: 2,
        unknown_kinds=lambda: 1,
        clock_offset_seconds=lambda: -7200.0,
    )
    page = metrics.render().decode()
    assert 'tinsmith_operator_api_requests_total{code="201",resource="pods",verb="create"} 1.0' in page
    ready = 'condition="Ready",kind="SamplerPool",namespace="tin",reason="Serving",status="True"'
    assert f"tinsmith_operator_conditions{{{ready}}} 2.0" in page
    assert 'tinsmith_operator_pool_replicas{namespace="tin",pool="tiny",state="wanted"} 1.0' in page
    assert "tinsmith_operator_queue_depth 3.0" in page
    assert "tinsmith_operator_leader 1.0" in page
    assert "tinsmith_operator_certificates_kept 0.0" in page
    assert "tinsmith_operator_namespaces_forbidden 2.0" in page
    assert "tinsmith_operator_kinds_unknown 1.0" in page
    assert "tinsmith_operator_clock_offset_seconds -7200.0" in page
    ends = [line for line in page.splitlines() if line.startswith("tinsmith_operator_certificate_expiry")]
    assert [float(line.split()[-1]) for line in ends] == [end.timestamp()] * 2


def test_the_desired_and_the_ready_replicas_of_a_pool_are_reported() -> None:
    metrics = Metrics()
    place = {"namespace": "research", "name": "qwen"}
    pools = [
        {"kind": "SamplerPool", "metadata": place, "spec": {"replicas": 3}, "status": {"readyReplicas": 2}},
        {"kind": "SamplerPool", "metadata": {**place, "name": "new"}, "spec": {}},
        {"kind": "TrainingSession", "metadata": {**place, "name": "of-another-kind"}, "spec": {}},
    ]
    metrics.watch(
        lambda: 0,
        lambda: True,
        lambda: pools,
        lambda: [],
        lambda: True,
        lambda: 0,
        unknown_kinds=int,
        clock_offset_seconds=float,
    )
    told = [line for line in metrics.render().decode().splitlines() if line.startswith("tinsmith_operator_pool_replic")]
    assert told == [
        'tinsmith_operator_pool_replicas{namespace="research",pool="qwen",state="wanted"} 3.0',
        'tinsmith_operator_pool_replicas{namespace="research",pool="qwen",state="ready"} 2.0',
        'tinsmith_operator_pool_replicas{namespace="research",pool="new",state="wanted"} 1.0',
        'tinsmith_operator_pool_replicas{namespace="research",pool="new",state="ready"} 0.0',
    ]
