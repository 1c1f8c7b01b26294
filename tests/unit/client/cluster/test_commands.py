"""The commands as they are typed, against a kubectl that simulates a small cluster."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes import families
from tinsmith.cli import main as tinsmith
from tinsmith.cluster.commands import main as kubectl_tinsmith

KUBECTL = """#!/bin/sh
here=${0%/*}
printf '%s\\t' "$@" >>"$here/asked"
echo >>"$here/asked"
for word in "$@"; do
    case $word in --*) ;; *) words="$words $word" ;; esac
done
set -- $words
case $1 in
    get)
        [ ! -e "$here/forbidden-${2%%[,.]*}" ] || { cat "$here/forbidden-${2%%[,.]*}" >&2; exit 1; }
        cat "$here/${2%%[,.]*}" 2>/dev/null || echo '{"items": []}' ;;
    logs) echo 'a line of the worker' ;;
    *) echo '{}' ;;
esac
"""


class SmallCluster:
    """A kubectl that answers lists by the first requested kind, from a file of that name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "kubectl").write_text(KUBECTL)
        (folder / "kubectl").chmod(0o755)

    def holds(self, **objects: list[dict[str, Any]]) -> None:
        """Return the stored objects by the plural of their kind."""
        for plural, items in objects.items():
            (self._folder / plural).write_text(json.dumps({"items": items}))

    def forbids(self, plural: str) -> None:
        (self._folder / f"forbidden-{plural}").write_text(f"Error from server (Forbidden): no {plural} for ada\n")

    def calls(self, verb: str) -> list[list[str]]:
        lines = (self._folder / "asked").read_text().splitlines()
        return [words for words in (line.split("\t")[:-1] for line in lines) if verb in words]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallCluster:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return SmallCluster(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the plugin as kubectl does, and return its exit status."""
    monkeypatch.setattr("sys.argv", ["kubectl-tinsmith", *words])
    with pytest.raises(SystemExit) as end:
        kubectl_tinsmith()
    return int(end.value.code or 0)


def test_the_cli_has_the_same_commands(cluster: SmallCluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.holds(samplerpools=[families.pool(conditions=families.ready())])
    with pytest.raises(SystemExit) as end:
        tinsmith(["cluster", "status", "--namespace", "n", "--output", "json"])
    assert not end.value.code
    [item] = json.loads(capsys.readouterr().out)["items"]
    assert (item["kind"], item["name"]) == ("SamplerPool", "draws")
    assert all("--namespace=n" in words for words in cluster.calls("get"))


def test_status_prints_plain_text_that_is_not_wrapped_and_explains_an_empty_namespace(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status") == 0
    empty = capsys.readouterr()
    assert (empty.out, "use -A for all namespaces" in empty.err) == ("", True)
    cluster.holds(trainingsessions=[families.session(conditions=families.unready("Suspended", "word " * 60))])
    assert run(monkeypatch, "status") == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[0] == "session/qwen, not ready: Suspended"
    assert "word " * 60 in shown.out
    assert ("\x1b" in shown.out, shown.err) == (False, "")


def test_status_shows_a_session_to_a_user_who_may_not_read_its_pods(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    session = families.session(conditions=families.ready())
    cluster.holds(trainingsessions=[session], statefulsets=[families.workload(session)])
    cluster.forbids("pods")
    assert run(monkeypatch, "status") == 0
    shown = capsys.readouterr()
    assert "statefulset/qwen, 1 of 1 ready" in shown.out
    assert shown.err.startswith("pods not shown: ")
    assert "no pods for ada" in shown.err


@pytest.mark.parametrize(
    ("words", "exit_status", "sentence"),
    [
        (["why", "missing"], 1, "There is no TrainingSession or SamplerPool missing here"),
        (["why", "pod/x"], 2, "NAME nor session/NAME nor pool/NAME"),
        (["suspend", "draws"], 2, "kubectl scale samplerpool draws --replicas=0"),
        (["logs", "qwen"], 1, "TrainingSession qwen has no pod now"),
        (["suspend", "qwen", "--timeout", "0"], 1, "The request was not completed within 0s"),
    ],
    ids=["not there", "another kind", "a pool", "no pod", "in vain"],
)
def test_a_failure_is_one_sentence_and_an_exit_status(
    cluster: SmallCluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    exit_status: int,
    sentence: str,
) -> None:
    cluster.holds(
        trainingsessions=[families.session(conditions=families.ready())],
        samplerpools=[families.pool(conditions=families.ready())],
    )
    assert run(monkeypatch, *words) == exit_status
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_logs_of_a_session_are_its_pods(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    session = families.session(conditions=families.ready())
    cluster.holds(trainingsessions=[session], pods=[families.pod("qwen-0", of=session)])
    assert run(monkeypatch, "logs", "qwen", "-f", "--previous", "--since=5m", "--context=c") == 0
    assert cluster.calls("logs") == [["--context=c", "logs", "qwen-0", "--follow", "--previous", "--since=5m"]]
    assert capfd.readouterr().out == "a line of the worker\n"


def test_logs_of_a_pool_are_those_of_all_replicas_with_their_names(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = families.pool(conditions=families.ready())
    cluster.holds(samplerpools=[pool], pods=[families.pod("draws-a", of=pool)])
    assert run(monkeypatch, "logs", "draws") == 0
    [words] = cluster.calls("logs")
    assert words[1:4] == ["--selector=tinsmith.dev/pool=draws", "--prefix", "--tail=-1"]


def test_a_report_says_where_it_is(
    cluster: SmallCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "help.tar.gz"
    assert run(monkeypatch, "report", f"--output={file}") == 0
    assert capsys.readouterr().out == f"{file}\n"
    assert file.stat().st_size > 0
