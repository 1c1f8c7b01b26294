#!/usr/bin/env python
"""Generate the tables in docs/ that come from the code, and write each table between its markers.

Reference.py [--check] With --check, the program changes nothing, and fails if a table differs from the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import get_args

import backend_runs
import chart_reference
import evidence_reference
import fault_reference
import gpu_reference
import limits_reference
import message_reference
import nemo_rl_sizing
import operator_reference
import protocol_reference
import resource_reference
import sdk_generations
from prometheus_client.core import Metric
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from tinsmith.cli import find_commands, summary_of
from tinsmith_operator.api.reasons import Progress
from tinsmith_rpc import worker_pb2
from tinsmith_server.errors import TinsmithError
from tinsmith_server.metrics.server import Metrics
from tinsmith_server.metrics.workers import DescribedWorker, SamplingFigures
from tinsmith_server.routes.http.problems import HTTP_STATUS
from tinsmith_server.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
OF_WORKERS = {"base_model", "worker"}


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def settings_table(fields: Mapping[str, FieldInfo]) -> str:
    """Return the table of settings. The page explains the names of the environment variables."""
    rows = [(f"`{name}`", _default_of(field), _meaning_of(field)) for name, field in fields.items()]
    return table(("Setting", "Default", "Meaning"), rows)


def _meaning_of(field: FieldInfo) -> str:
    """Return the description of the field. A field with choices needs no description."""
    return field.description or f"One of {', '.join(f'`{choice}`' for choice in get_args(field.annotation))}."


def _default_of(field: FieldInfo) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if value is None or value is PydanticUndefined or value in ((), ""):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def metrics_table(families: Iterable[Metric]) -> str:
    rows = [
        (f"`{_exposed_name(family)}`", family.type, _labels_of(family), family.documentation)
        for family in sorted(families, key=lambda family: family.name)
    ]
    return table(("Metric", "Type", "Labels", "Meaning"), rows)


def server_families() -> Iterable[Metric]:
    """Return the metrics of a server that has answered one request and read one worker."""
    metrics = Metrics()
    metrics.note_request("/", 200, 0.0)
    reply = worker_pb2.DescribeReply(volume_free_bytes=0)
    reply.metrics.adapters_taken["root"] = reply.metrics.streams_failed["slow"] = 1
    worker = DescribedWorker("org/model", "worker", reply)
    metrics.watch(lambda: [worker], lambda: {"session.active": 1}, lambda: 0)
    sampled = {("model", "pool"): 1}
    metrics.watch_sampling(lambda: SamplingFigures(sampled, {"model": 1}, sampled))
    return metrics.registry.collect()


def _exposed_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else family.name


def _labels_of(family: Metric) -> str:
    """Return the labels of the metric.

    Two labels of all worker metrics are left out, because the page names these labels once.
    """
    labels = {name: None for sample in family.samples for name in sample.labels if name != "le"}
    if labels.keys() >= OF_WORKERS:
        labels = {name: None for name in labels if name not in OF_WORKERS}
    return ", ".join(f"`{label}`" for label in labels)


def commands_table() -> str:
    rows = [(f"`tinsmith {name}`", summary_of(command)) for name, command in find_commands().items()]
    return table(("Command", "What it does"), rows)


def statuses_table() -> str:
    rows = [(str(status), _when(kind)) for kind, status in HTTP_STATUS.items()]
    return table(("Status", "When"), sorted(rows, key=lambda row: row[0]))


def _when(kind: type[TinsmithError]) -> str:
    if kind is TinsmithError:
        return "Any other failure; the server's log says more."
    return (kind.__doc__ or "").partition("\n")[0]


def values_table(*sections: str) -> str:
    """Return the table of the values in these sections of the chart."""
    return table(("Value", "Default", "Meaning"), chart_reference.values_rows(sections))


def spec_table(crd: Path) -> str:
    return table(("Field", "Type", "Default", "Meaning"), resource_reference.spec_rows(crd))


def status_table(crd: Path) -> str:
    return table(("Field", "Meaning"), resource_reference.status_rows(crd))


def gpu_runs_table() -> str:
    return table(("Promise", "Needs", "Last run"), gpu_reference.run_rows())


def gpu_benchmarks_table() -> str:
    header = (
        "Model and step",
        "Tokens per second",
        "Of a bare PEFT loop",
        "Peak of memory",
        "Sampled tokens per second",
    )
    return table((*header, "Run"), gpu_reference.benchmark_rows())


def gpu_calls_table() -> str:
    return table(("Model and work", "Time", "Tokens per second", "Run"), gpu_reference.calls_rows())


def conditions_table() -> str:
    return table(("Condition", "When it is True"), message_reference.condition_rows())


def reasons_table(progress: Progress) -> str:
    cure = ("What to do",) if progress is Progress.STUCK else ()
    return table(("Reason", "What it means", *cure), message_reference.reason_rows(progress))


def calls_table() -> str:
    return table(protocol_reference.CALL_HEADER, protocol_reference.call_rows())


def flags_table() -> str:
    return table(protocol_reference.FLAG_HEADER, protocol_reference.flag_rows())


def runs_table(runs: backend_runs.BackendRuns) -> str:
    return table(backend_runs.HEADER, runs.rows())


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "settings": ("reference/settings.md", lambda: settings_table(Settings.model_fields)),
    "calls": ("reference/protocol.md", calls_table),
    "flags": ("reference/protocol.md", flags_table),
    "needs": ("reference/protocol.md", protocol_reference.needs),
    "limits": (
        "reference/limits.md",
        lambda: table(("Setting", "Default", "At the limit"), limits_reference.setting_rows()),
    ),
    "fixed-limits": (
        "reference/limits.md",
        lambda: table(("What", "At most", "At the limit"), limits_reference.fixed_rows()),
    ),
    "body-limits": ("reference/limits.md", lambda: table(("At most", "Calls"), limits_reference.body_rows())),
    "metrics": ("reference/metrics.md", lambda: metrics_table(server_families())),
    "operator-settings": ("reference/operator.md", lambda: settings_table(operator_reference.setting_fields())),
    "operator-metrics": ("reference/operator.md", lambda: metrics_table(operator_reference.metric_families())),
    "commands": ("reference/commands.md", commands_table),
    "statuses": ("reference/errors.md", statuses_table),
    "faults": ("reference/errors.md", lambda: table(fault_reference.HEADER, fault_reference.rows())),
    "evidence": ("reference/evidence.md", lambda: table(evidence_reference.HEADER, evidence_reference.rows())),
    "generations": ("reference/protocol.md", lambda: table(sdk_generations.HEADER, sdk_generations.rows())),
    "operator-values": ("reference/chart.md", lambda: values_table("operator")),
    "shared-values": (
        "reference/chart.md",
        lambda: table(("Value", "Default", "Meaning"), chart_reference.shared_rows()),
    ),
    "api-server-values": ("reference/chart.md", lambda: values_table("apiServer")),
    "values": ("reference/chart.md", lambda: values_table(*chart_reference.other_sections())),
    "spec": ("reference/training-session.md", lambda: spec_table(chart_reference.SESSION_CRD)),
    "status": ("reference/training-session.md", lambda: status_table(chart_reference.SESSION_CRD)),
    "pool-spec": (
        "reference/sampler-pool.md",
        lambda: table(
            ("Field", "Type", "Default", "Meaning"),
            resource_reference.spec_rows(chart_reference.POOL_CRD, chart_reference.SESSION_CRD),
        ),
    ),
    "pool-status": ("reference/sampler-pool.md", lambda: status_table(chart_reference.POOL_CRD)),
    "gpu-runs": ("how-to/gpu.md", gpu_runs_table),
    "gpu-benchmarks": ("how-to/gpu.md", gpu_benchmarks_table),
    "gpu-calls": ("how-to/gpu.md", gpu_calls_table),
    "nemo-rl-sizing": ("how-to/nemo-rl.md", lambda: table(nemo_rl_sizing.HEADER, nemo_rl_sizing.rows())),
    "nemo-rl-runs": ("how-to/nemo-rl.md", lambda: runs_table(backend_runs.NEMO_RL)),
    "miles-runs": ("how-to/miles.md", lambda: runs_table(backend_runs.MILES)),
    "nemo-rl-recompute": (
        "how-to/nemo-rl.md",
        lambda: table(nemo_rl_sizing.RECOMPUTE_HEADER, nemo_rl_sizing.recompute_rows()),
    ),
    "conditions": ("reference/conditions.md", conditions_table),
    "stuck": ("reference/conditions.md", lambda: reasons_table(Progress.STUCK)),
    "moving": ("reference/conditions.md", lambda: reasons_table(Progress.MOVING)),
    "done": ("reference/conditions.md", lambda: reasons_table(Progress.DONE)),
    "events": ("reference/conditions.md", lambda: table(("Reason", "Type", "Message"), message_reference.event_rows())),
    "alerts": (
        "reference/conditions.md",
        lambda: table(("Alert", "Severity", "After", "Summary"), message_reference.alert_rows()),
    ),
}


def with_table(text: str, name: str, content: str) -> str:
    """Return the page with new content between the markers with this name.

    Raises ValueError if the page does not contain the markers.
    """
    begin, end = f"<!-- {name}: written by `make docs` -->", f"<!-- end of {name} -->"
    replaced, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{content}\n{end}", text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"the markers {begin} and {end} must be there once")
    return replaced


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    stale = chart_reference.refresh(check=check)
    for name, (page, content) in TABLES.items():
        file = DOCS / page
        text = file.read_text()
        wanted = with_table(text, name, content())
        if wanted != text:
            stale.append(f"the table of {name} in docs/{page}")
            if not check:
                file.write_text(wanted)
    if check and stale:
        print(f"not what the code says: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
