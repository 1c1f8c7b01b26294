"""A report contains what helps and no secrets, and lists what is missing."""

from __future__ import annotations

import json
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kubernetes import families
from tinsmith.cluster.bundle import INDEX, REMOVED, Bundle, NotWritten
from tinsmith.cluster.families import INSTALLATION_SELECTOR, Kind, Target
from tinsmith.cluster.kubectl import ClusterUnreachable, Forbidden, Kubectl, KubectlFailed, NotFound, PluginError
from tinsmith.cluster.manifests import Manifest
from tinsmith.cluster.report import collect
from typing_extensions import override

SECRET = "hunter2-of-ada"
DSN = "postgresql://tinsmith:Tr0ub4dor@db:5432/tinsmith"


class Installation(Kubectl):
    """A cluster in memory with one session, one pool and an operator; `forbidden` are kinds that may not be read."""

    def __init__(self, forbidden: tuple[str, ...] = ()) -> None:
        super().__init__(program="never-run")
        self._forbidden = forbidden
        session, pool = families.session(conditions=families.ready()), families.pool(conditions=families.ready())
        session["spec"]["pod"] = {"env": [{"name": "WANDB_API_KEY", "value": SECRET}]}
        pod = families.pod("qwen-0", of=session, restartCount=1)
        operator = families.pod("tinsmith-operator-x", of=session)
        operator["metadata"]["labels"] = {"app.kubernetes.io/name": "tinsmith"}
        self.logs = {"qwen-0": f"logging in with {SECRET}\n", "tinsmith-operator-x": f"store {DSN}\n"}
        self.objects: dict[str, list[Manifest]] = {
            Kind.SESSION.resource: [session],
            Kind.POOL.resource: [pool],
            "pods": [pod, families.pod("draws-a", of=pool)],
            "statefulsets.apps": [families.workload(session)],
            "persistentvolumeclaims": [families.claim(session)],
            "events": [families.event(pod, "BackOff", f"failed with --token={SECRET}", minutes=1)],
        }
        self.installed = {"pods": [operator]}

    @override
    def within(self, namespace: str) -> Kubectl:
        return self

    @override
    def everywhere(self) -> Kubectl:
        return self

    @override
    def find(self, resources: str, selector: str | None = None) -> list[Manifest]:
        objects = self.installed if selector == INSTALLATION_SELECTOR else self.objects
        wanted = resources.split(",")
        if refused := set(wanted) & set(self._forbidden):
            raise Forbidden(f"Your rights do not allow it: {', '.join(sorted(refused))}.")
        return [item for resource in wanted for item in objects.get(resource, [])]

    @override
    def text(self, *words: str) -> str:
        if words[0] in self._forbidden or words[1] in self._forbidden:
            raise Forbidden(f"Your rights do not allow it: {words[0]}.")
        if words[0] == "logs":
            return self.logs.get(words[1], "")
        return "{}"


def report_of(kubectl: Kubectl, target: Target | None = None) -> dict[str, str]:
    bundle = Bundle(families.NOW)
    collect(kubectl, target, bundle, progress=lambda _: None)
    return bundle.files()


def test_a_report_has_resources_events_logs_and_versions() -> None:
    files = report_of(Installation())
    assert {
        INDEX,
        "status.txt",
        "versions/client.json",
        "versions/cluster.json",
        "research/session-qwen/trainingsession-qwen.json",
        "research/session-qwen/pod-qwen-0.json",
        "research/session-qwen/statefulset-qwen.json",
        "research/session-qwen/persistentvolumeclaim-qwen-journal.json",
        "research/session-qwen/events.json",
        "research/session-qwen/why.txt",
        "research/session-qwen/qwen-0.worker.log",
        "research/session-qwen/qwen-0.worker.previous.log",
        "research/pool-draws/samplerpool-draws.json",
        "research/pool-draws/draws-a.worker.log",
        "research/installation/pod-tinsmith-operator-x.json",
        "research/installation/tinsmith-operator-x.worker.log",
        "secrets/workers.txt",
    } <= set(files)


def test_no_planted_secret_is_in_any_file() -> None:
    files = report_of(Installation())
    assert not [path for path, content in files.items() if SECRET in content or "Tr0ub4dor" in content]
    assert files["research/session-qwen/qwen-0.worker.log"] == "logging in with <removed>\n"


def test_unreadable_objects_are_in_the_index_and_the_others_are_in_the_report() -> None:
    files = report_of(Installation(forbidden=("logs", "persistentvolumeclaims", "secrets", "events")))
    left_out = files[INDEX].partition("## Left out")[2]
    assert "the log of qwen-0, container worker: Your rights do not allow it" in left_out
    assert "persistentvolumeclaims not shown: Your rights do not allow it" in left_out
    assert "secrets of the workers: Your rights do not allow it" in left_out
    assert "research/session-qwen/pod-qwen-0.json" in files


def failing(kubectl: Kubectl, error: PluginError) -> Kubectl:
    """Return a kubectl whose `version` raises this error."""
    text = kubectl.text

    def answer(*words: str) -> str:
        if words[0] == "version":
            raise error
        return text(*words)

    kubectl.text = answer  # type: ignore[method-assign]
    return kubectl


def test_a_cluster_that_shows_neither_sessions_nor_versions_still_gives_a_report() -> None:
    files = report_of(failing(Installation(forbidden=(Kind.SESSION.resource,)), KubectlFailed("kubectl failed.")))
    left_out = files[INDEX].partition("## Left out")[2]
    assert "sessions and pools: Your rights do not allow it" in left_out
    assert "the cluster's version: kubectl failed." in left_out
    assert "research/installation/tinsmith-operator-x.worker.log" in files


def test_a_report_on_one_name_has_no_other_family() -> None:
    files = report_of(Installation(), Target("draws", Kind.POOL))
    assert not [path for path in files if "session-qwen" in path]
    assert "research/pool-draws/samplerpool-draws.json" in files


def test_an_unknown_name_or_an_unreachable_cluster_gives_no_report() -> None:
    with pytest.raises(NotFound):
        report_of(Installation(), Target("missing"))
    with pytest.raises(ClusterUnreachable):
        report_of(failing(Installation(), ClusterUnreachable("No cluster answers.")))


def test_the_newest_lines_of_a_long_log_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinsmith.cluster.report.LOG_CHARACTERS", 1200)
    cluster = Installation()
    cluster.logs["qwen-0"] = "an old line\n" * 100 + "the newest line\n"
    files = report_of(cluster)
    log = files["research/session-qwen/qwen-0.worker.log"]
    assert 1100 < len(log) <= 1200
    assert log.startswith("an old line\n")
    assert log.endswith("the newest line\n")
    assert "the beginning of the log of qwen-0" in files[INDEX]


def test_the_archive_is_its_owners_alone_and_unpacks_into_a_folder(tmp_path: Path) -> None:
    bundle = Bundle(families.NOW)
    bundle.add_object("a/b.json", {"x": 1})
    file = tmp_path / "help.tar.gz"
    bundle.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with tarfile.open(file) as archive:
        assert archive.getnames() == [f"help/{INDEX}", "help/a/b.json"]
        found: Any = archive.extractfile("help/a/b.json")
        assert json.load(found) == {"x": 1}


def test_an_archive_that_cannot_be_written_is_one_message_with_the_option(tmp_path: Path) -> None:
    file = tmp_path / "missing" / "help.tar.gz"
    with pytest.raises(NotWritten, match=f"cannot be written to {file}: .*choose another --output"):
        Bundle(families.NOW).write(file)


PASSWORDS = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=4, max_size=30).map("q7".__add__)
"""Passwords that share no word with their surroundings."""


@given(password=PASSWORDS, order=st.permutations(["spec", "log", "event"]))
def test_a_password_of_one_part_is_removed_from_all_parts_in_any_order(password: str, order: list[str]) -> None:
    parts: dict[str, Callable[[Bundle], None]] = {
        "spec": lambda bundle: bundle.add_object("a.json", {"env": [{"name": "DB_PASSWORD", "value": password}]}),
        "log": lambda bundle: bundle.add_text("b.log", f"said {password} aloud"),
        "event": lambda bundle: bundle.add_object("c.json", [{"message": f"login as u:{password} failed"}]),
    }
    bundle = Bundle(families.NOW)
    for part in order:
        parts[part](bundle)
    bundle.leave_out("something", f"refused {password}")
    expected = {
        "a.json": {"env": [{"name": "DB_PASSWORD", "value": REMOVED}]},
        "c.json": [{"message": f"login as u:{REMOVED} failed"}],
    }
    files = bundle.files()
    assert {path: json.loads(files[path]) for path in expected} == expected
    assert files["b.log"] == f"said {REMOVED} aloud"
    assert f"refused {REMOVED}" in files[INDEX]
