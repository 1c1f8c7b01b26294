"""The plugin against pods that really run: what they write, and what is left out of a report about them."""

from __future__ import annotations

import tarfile
from pathlib import Path

from cluster.node.conftest import SESSION
from cluster.plugin.conftest import PluginResult, run_plugin
from support.kubernetes.installation import API_KEY, Installation
from support.kubernetes.services import PASSWORD


def run(installation: Installation, *words: str) -> PluginResult:
    said = run_plugin(installation.cluster, installation.namespace, words)
    assert said.status == 0, said.err
    return said


def test_a_requested_snapshot_is_taken(installation: Installation, session: str) -> None:
    run(installation, "snapshot", session)
    assert (installation.get("trainingsession", session) or {})["status"]["lastSnapshotTime"]


def test_a_report_holds_the_logs_of_all_and_no_secret(installation: Installation, session: str, tmp_path: Path) -> None:
    bundle = tmp_path / "report.tar.gz"
    run(installation, "report", "-o", str(bundle))
    with tarfile.open(bundle) as archive:
        contents = {
            member.name: stream.read().decode()
            for member in archive.getmembers()
            if (stream := archive.extractfile(member)) is not None
        }
    everything = "\n".join(contents.values())
    for program in (f"{SESSION}-0", f"{installation.release}-operator", f"{installation.release}-api-server"):
        assert any(program in name and len(content) > 0 for name, content in contents.items()), sorted(contents)
    assert API_KEY not in everything
    assert PASSWORD not in everything
    assert "PRIVATE KEY" not in everything
