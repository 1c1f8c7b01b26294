"""Alerts fire when they should and not otherwise, and everything shown or alerted on is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_reference import metric_families
from reference import server_families
from support.kubernetes.charts import CHART, ROOT, Object, named, render
from support.kubernetes.prometheus import Prometheus, Refused, Selector

MONITORED = render(
    {"monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboards")}}
)
GROUPS: list[Object] = named(MONITORED, "PrometheusRule", "tinsmith")["spec"]["groups"]
ALERTS: dict[str, Object] = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
DASHBOARDS: dict[str, Object] = {path.name: json.loads(path.read_text()) for path in CHART.glob("dashboards/*.json")}

# Of Prometheus itself, and of every kubelet.
OTHERS = {
    "up": set[str](),
    "kubelet_volume_stats_available_bytes": {"persistentvolumeclaim"},
    "kubelet_volume_stats_capacity_bytes": {"persistentvolumeclaim"},
}
# What a ServiceMonitor gives every series. A metric's own `namespace` becomes `exported_namespace`.
OF_THE_TARGET = {"namespace", "job", "pod"}


def exported_metrics() -> dict[str, set[str]]:
    """Return the labels of each metric, from the registries that `make docs` writes its tables from."""
    found = {}
    for family in (*server_families(), *metric_families()):
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        own = {"exported_namespace" if label == "namespace" else label for label in labels}
        if family.type == "histogram":
            found.update(
                {f"{family.name}_bucket": {*own, "le"}, f"{family.name}_sum": own, f"{family.name}_count": own}
            )
        else:
            found[f"{family.name}_total" if family.type == "counter" else family.name] = own
    return found


METRICS = {**exported_metrics(), **OTHERS}


def expressions_of(dashboard: Object) -> Iterator[str]:
    """Return the expressions as Grafana sends them, with a choice for each variable."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"].replace("$namespace", "research").replace("$base_model", ".*")
            assert "$" not in expression, f"{panel['title']} has a variable that the dashboard does not"
            yield expression


SHOWN = [expression for dashboard in DASHBOARDS.values() for expression in expressions_of(dashboard)]


def test_prometheus_accepts_the_alerts_and_their_texts(prometheus: Prometheus) -> None:
    prometheus.check_rules(GROUPS)


def test_a_template_that_prometheus_could_not_fill_in_would_be_seen(prometheus: Prometheus) -> None:
    rule = {"alert": "A", "expr": "up == 0", "annotations": {"summary": "{{ $label.pod }}"}}
    with pytest.raises(Refused, match="label"):
        prometheus.check_rules([{"name": "a", "rules": [rule]}])


def test_every_metric_and_label_in_use_exists(prometheus: Prometheus) -> None:
    answers = prometheus.evaluate([*(rule["expr"] for rule in ALERTS.values()), *SHOWN])
    selectors = [selector for answer in answers for selector in answer.selectors]
    assert {each.metric for each in selectors} - METRICS.keys() == set()
    assert [each for each in selectors if each.matchers.keys() - METRICS[each.metric] - OF_THE_TARGET] == []


def grouped_labels(expression: str) -> set[str]:
    return {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}


def test_every_label_of_a_grouping_exists(prometheus: Prometheus) -> None:
    expressions = [*(rule["expr"] for rule in ALERTS.values()), *SHOWN]
    for expression, answer in zip(expressions, prometheus.evaluate(expressions), strict=True):
        has = OF_THE_TARGET.union(*(METRICS[each.metric] for each in answer.selectors))
        assert grouped_labels(expression) <= has, expression


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_speaks_of_labels_that_it_has(alert: str) -> None:
    said = set(re.findall(r"\$labels\.(\w+)", json.dumps(ALERTS[alert]["annotations"])))
    assert said <= grouped_labels(ALERTS[alert]["expr"])


def test_an_alert_is_about_its_own_release(prometheus: Prometheus) -> None:
    def is_about_tinsmith(selector: Selector) -> bool:
        if selector.metric.startswith("kubelet_"):
            return selector.matchers["namespace"] == "research"
        jobs = ("tinsmith-operator", "tinsmith-api-server")
        return selector.matchers["namespace"] == "research" and selector.matchers["job"] in jobs

    answers = prometheus.evaluate([rule["expr"] for rule in ALERTS.values()])
    assert [each for answer in answers for each in answer.selectors if not is_about_tinsmith(each)] == []


@pytest.mark.parametrize(
    ("scope", "namespaces"),
    [
        pytest.param({"namespaces": ["team-a", "team-b"]}, 'namespace=~"team-a|team-b|research"', id="namespaces"),
        pytest.param({"cluster": True}, 'namespace!=""', id="cluster"),
    ],
)
def test_volumes_are_watched_wherever_sessions_are(scope: Object, namespaces: str) -> None:
    values = {
        "scope": scope,
        "checkpoints": {"remote": {"url": "s3://bucket"}},
        "monitoring": {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}},
    }
    rules = json.dumps(named(render(values), "PrometheusRule", "tinsmith"))
    assert rules.count(json.dumps(namespaces).strip('"')) == 2


# ---- when they fire

OPERATOR = 'namespace="research",job="tinsmith-operator"'
API_SERVER = 'namespace="research",job="tinsmith-api-server"'
DAY = 86400


def condition(kind: str, condition: str, status: str, reason: str) -> str:
    labels = f'kind="{kind}",condition="{condition}",status="{status}",reason="{reason}"'
    return f'tinsmith_operator_conditions{{{OPERATOR},exported_namespace="team-a",{labels}}}'


def replicas(pool: str, state: str) -> str:
    return f'tinsmith_operator_pool_replicas{{{OPERATOR},exported_namespace="team-a",pool="{pool}",state="{state}"}}'


def requests(route: str, status: int) -> str:
    return f'tinsmith_http_requests_total{{{API_SERVER},pod="a",route="{route}",status="{status}"}}'


def accepting(base_model: str, kind: str) -> str:
    return f'tinsmith_samplers_accepting{{{API_SERVER},pod="a",base_model="{base_model}",kind="{kind}"}}'


def worker(metric: str) -> str:
    return f'{metric}{{{API_SERVER},base_model="org/model",worker="team-a/tiny"}}'


def volume(metric: str, claim: str) -> str:
    return f'kubelet_volume_stats_{metric}_bytes{{namespace="research",persistentvolumeclaim="{claim}"}}'


def request_seconds(le: str) -> str:
    return f'tinsmith_http_request_seconds_bucket{{{API_SERVER},route="/api/v1/optim_step",le="{le}"}}'


# An installation as it should be, minute by minute.
CERTIFICATE = f'tinsmith_operator_certificate_expiry_timestamp_seconds{{{OPERATOR},secret="tiny"}}'
HEALTHY = {
    f'tinsmith_operator_leader{{{OPERATOR},pod="a"}}': "1x120",
    f'tinsmith_operator_leader{{{OPERATOR},pod="b"}}': "0x120",
    f'tinsmith_operator_reconciles_total{{{OPERATOR},result="settled"}}': "0+5x120",
    f'tinsmith_operator_reconciles_total{{{OPERATOR},result="error"}}': "3x120",
    f"tinsmith_operator_certificates_kept{{{OPERATOR}}}": "1x120",
    f"tinsmith_operator_namespaces_forbidden{{{OPERATOR}}}": "0x120",
    f"tinsmith_operator_kinds_unknown{{{OPERATOR}}}": "0x120",
    f"tinsmith_operator_clock_offset_seconds{{{OPERATOR}}}": "-30x120",
    CERTIFICATE: f"{20 * DAY}x120",
    condition("TrainingSession", "Ready", "True", "WorkerReady"): "3x120",
    condition("TrainingSession", "Ready", "False", "Suspended"): "1x120",
    condition("TrainingSession", "Stalled", "False", "AsWanted"): "4x120",
    condition("TrainingSession", "Degraded", "False", "AsExpected"): "4x120",
    condition("SamplerPool", "Ready", "False", "ScaledToZero"): "1x120",
    replicas("scaled-to-zero", "wanted"): "0x120",
    replicas("scaled-to-zero", "ready"): "0x120",
    replicas("rolling", "wanted"): "3x120",
    replicas("rolling", "ready"): "1x120",
    f'up{{{API_SERVER},pod="a"}}': "1x120",
    f'up{{{API_SERVER},pod="b"}}': "0x120",
    requests("/api/v1/optim_step", 200): "0+600x120",
    requests("/api/v1/optim_step", 500): "0+1x120",
    requests("/api/v1/readyz", 200): "0+12x120",
    requests("/api/v1/readyz", 503): "2x120",
    request_seconds("0.1"): "0+600x120",
    request_seconds("10"): "0+600x120",
    request_seconds("+Inf"): "0+600x120",
    accepting("org/model", "pool"): "2x120",
    accepting("org/model", "colocated"): "0x120",
    # A template before the first request for a session, and a pool that is scaled to 0 for the night.
    accepting("of-a-template", "colocated"): "0x120",
    accepting("asleep", "pool"): "2x60 0x59",
    requests("/api/v1/asample", 200): "0+600x120",
    requests("/api/v1/asample", 429): "0+9x60 540x59",
    worker("tinsmith_journal_operations_total"): "0+7x100 0+7x20",
    worker("tinsmith_queue_age_seconds"): "20x120",
    worker("tinsmith_models_corrupted"): "0x120",
    worker("tinsmith_models_quarantined"): "0x120",
    worker("tinsmith_volume_full"): "0x120",
    worker("tinsmith_logprob_gap"): "0.0001x120",
    volume("available", "tiny-journal"): "50x120",
    volume("capacity", "tiny-journal"): "100x120",
    volume("available", "other-claim"): "1x120",
    volume("capacity", "other-claim"): "100x120",
}
# What is another way when the alert fires; None where there is nothing any more.
WRONG: dict[str, dict[str, str | None]] = {
    "TinsmithNoOperatorLeads": {f'tinsmith_operator_leader{{{OPERATOR},pod="a"}}': "0x120"},
    "TinsmithOperatorFails": {f'tinsmith_operator_reconciles_total{{{OPERATOR},result="unreadable"}}': "0+1x120"},
    "TinsmithNamespacesForbidden": {f"tinsmith_operator_namespaces_forbidden{{{OPERATOR}}}": "2x120"},
    "TinsmithCRDMissing": {f"tinsmith_operator_kinds_unknown{{{OPERATOR}}}": "1x120"},
    "TinsmithClocksDiffer": {f"tinsmith_operator_clock_offset_seconds{{{OPERATOR}}}": "-7200x120"},
    "TinsmithStalled": {condition("SamplerPool", "Stalled", "True", "ImagePullFailed"): "1x120"},
    "TinsmithSessionNotReady": {condition("TrainingSession", "Ready", "False", "Unschedulable"): "1x120"},
    "TinsmithPoolNotReady": {replicas("rolling", "ready"): "0x120"},
    "TinsmithDegraded": {condition("TrainingSession", "Degraded", "True", "NodeUnreachable"): "1x120"},
    "TinsmithCertificatesNotKept": {f"tinsmith_operator_certificates_kept{{{OPERATOR}}}": "0x120"},
    "TinsmithCertificateEnds": {CERTIFICATE: f"{4 * DAY}x120"},
    "TinsmithNoApiServer": {f'up{{{API_SERVER},pod="a"}}': None, f'up{{{API_SERVER},pod="b"}}': None},
    "TinsmithStoreUnreachable": {requests("/api/v1/readyz", 503): "0+12x120"},
    "TinsmithApiErrors": {requests("/api/v1/optim_step", 500): "0+60x120"},
    "TinsmithApiSlow": {request_seconds("0.1"): "0+300x120"},
    "TinsmithNoSampler": {
        accepting("asleep", "pool"): "2x120",
        accepting("of-a-template", "colocated"): "1x120",
        accepting("org/model", "pool"): "0x120",
        requests("/api/v1/asample", 429): "0+9x120",
    },
    "TinsmithWorkerRestarts": {worker("tinsmith_journal_operations_total"): "0+7x80 0+7x10 0+7x10 0+7x20"},
    "TinsmithOperationWaits": {worker("tinsmith_queue_age_seconds"): "0+60x120"},
    "TinsmithModelsCorrupted": {worker("tinsmith_models_corrupted"): "1x120"},
    "TinsmithModelsWait": {worker("tinsmith_models_quarantined"): "1x120"},
    "TinsmithVolumeFull": {worker("tinsmith_volume_full"): "1x120"},
    "TinsmithLogprobGap": {worker("tinsmith_logprob_gap"): "0.02x120"},
    "TinsmithVolumeFillsUp": {volume("available", "tiny-journal"): "9x120"},
}


def firing(prometheus: Prometheus, changes: dict[str, str | None]) -> dict[str, list[dict[str, str]]]:
    """Return the labels of each firing alert after two hours."""
    series = [f"{name} {values}" for name, values in {**HEALTHY, **changes}.items() if values is not None]
    answers = prometheus.evaluate([rule["expr"] for rule in ALERTS.values()], series, at_seconds=7200)
    found = zip(ALERTS, answers, strict=True)
    return {name: [each.labels for each in answer.samples] for name, answer in found if answer.samples}


def test_no_alert_fires_while_all_is_well(prometheus: Prometheus) -> None:
    assert firing(prometheus, {}) == {}


def test_every_alert_is_tried() -> None:
    assert WRONG.keys() == ALERTS.keys()


@pytest.mark.parametrize("alert", WRONG)
def test_an_alert_fires_for_the_problem_in_its_name(prometheus: Prometheus, alert: str) -> None:
    found = firing(prometheus, WRONG[alert])
    assert len(found[alert]) == 1
    # A stalled pool is not ready either; nothing else comes along.
    assert found.keys() == {alert}


def test_a_model_may_take_as_long_to_load_as_its_spec_lets_it() -> None:
    for plural, alert in (("trainingsessions", "TinsmithSessionNotReady"), ("samplerpools", "TinsmithPoolNotReady")):
        definition = yaml.safe_load((ROOT / "crds" / f"tinsmith.dev_{plural}.yaml").read_text())
        spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        startup = spec["properties"]["pod"]["properties"]["startupTimeoutSeconds"]["default"]
        assert waited_minutes(alert) * 60 > startup


@pytest.mark.parametrize(("outage_minutes", "alerts"), [(1.5, False), (8, True)])
def test_a_failover_of_the_database_is_no_outage(prometheus: Prometheus, outage_minutes: float, alerts: bool) -> None:
    """Fourteen looks a minute at readiness while it lasts, which begins just before Prometheus looks."""
    refused = [min(max(minute - 40.9, 0), outage_minutes) * 14 for minute in range(121)]
    series = f"{requests('/api/v1/readyz', 503)} {' '.join(map(str, refused))}"
    held = f"count_over_time(({ALERTS['TinsmithStoreUnreachable']['expr']})[2h:1m])"
    [answer] = prometheus.evaluate([held], [series], at_seconds=7200)
    [sample] = answer.samples
    assert (sample.value > waited_minutes("TinsmithStoreUnreachable")) is alerts


def waited_minutes(alert: str) -> int:
    return int(ALERTS[alert]["for"].removesuffix("m"))


# ---- where they lead


def test_every_alert_leads_to_its_section_of_the_runbooks_and_no_section_is_of_none() -> None:
    page = (ROOT / "docs" / "how-to" / "runbooks.md").read_text()
    assert re.findall(r"^## (Tinsmith\w+)$", page, re.MULTILINE) == list(ALERTS)
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook_url"] == f"docs/how-to/runbooks.md#{name.lower()}"


def test_runbooks_can_be_served_elsewhere() -> None:
    rules = {"enabled": True, "runbookUrl": "https://docs.example.com/runbooks"}
    objects = render({"monitoring": {"serviceMonitor": {"enabled": True}, "prometheusRule": rules}})
    [group, *_] = named(objects, "PrometheusRule", "tinsmith")["spec"]["groups"]
    url = group["rules"][0]["annotations"]["runbook_url"]
    assert url == "https://docs.example.com/runbooks#tinsmithnooperatorleads"


@pytest.mark.parametrize("component", ["operator", "api-server"])
def test_a_monitor_finds_the_port_of_its_component_s_metrics(component: str) -> None:
    monitor = named(MONITORED, "ServiceMonitor", f"tinsmith-{component}")["spec"]
    [endpoint] = monitor["endpoints"]
    assert endpoint["path"] == "/metrics"
    [service] = [
        one
        for one in MONITORED
        if one["kind"] == "Service"
        and monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
        and endpoint["port"] in {port["name"] for port in one["spec"]["ports"]}
    ]
    pods = named(MONITORED, "Deployment", f"tinsmith-{component}")["spec"]["template"]
    assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    [container] = pods["spec"]["containers"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}


def test_metrics_are_on_no_service_that_may_be_open_to_the_world() -> None:
    service = named(render({"apiServer": {"service": {"type": "LoadBalancer"}}}), "Service", "tinsmith-api-server")
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]


def test_dashboards_fit_into_their_config_map_as_they_are() -> None:
    data: dict[str, Any] = named(MONITORED, "ConfigMap", "tinsmith-dashboards")["data"]
    assert {name: json.loads(text) for name, text in data.items()} == DASHBOARDS
    assert sum(len(text) for text in data.values()) < 1_000_000


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_of_a_dashboard_are_explained_and_do_not_overlap(name: str) -> None:
    panels = DASHBOARDS[name]["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] != "row" and not panel["description"]] == []
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = {(x, y) for x in columns for y in rows}
        assert not cells & taken, panel["title"]
        assert max(columns) < 24
        taken |= cells


def test_names_of_metrics_in_pages_are_those_of_metrics() -> None:
    pages = [Path(ROOT / "docs" / name).read_text() for name in ("how-to/runbooks.md", "how-to/chart.md")]
    named_there = {name for page in pages for name in re.findall(r"\btinsmith_\w+", page)}
    packages = {"tinsmith_server", "tinsmith_operator"}
    assert named_there - METRICS.keys() - packages == set()


def test_the_rule_for_the_prometheus_adapter_counts_the_samples_of_one_pool_once(prometheus: Prometheus) -> None:
    """Each API server exports the series of every replica."""
    text = (ROOT / "examples" / "sampler-pool-prometheus.yaml").read_text()
    comments = [line.removeprefix("#").removeprefix(" ") for line in text.splitlines() if line.startswith("#")]
    written = "\n".join(comments[comments.index("  rules:") : comments.index("", comments.index("  rules:"))])
    [rule] = yaml.safe_load(written)["rules"]["external"]
    autoscaler = yaml.safe_load(text)
    assert [each["external"]["metric"]["name"] for each in autoscaler["spec"]["metrics"]] == [rule["name"]["as"]]
    series = [
        f'tinsmith_futures{{worker="{worker}",base_model="m",state="{state}",instance="{server}"}} {count}'
        for worker in ("tinsmith/tiny-sampler-a", "tinsmith/tiny-sampler-b", "tinsmith/other-sampler-c")
        for state, count in (("sampling", 2), ("waiting_to_sample", 3), ("done", 100))
        for server in ("server-1", "server-2")
    ]
    [answer] = prometheus.evaluate([rule["metricsQuery"]], series)
    assert [sample.value for sample in answer.samples] == [10]
