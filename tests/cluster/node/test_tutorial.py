"""The tutorial of the cluster, run as it is: a program trains through the ingress while its worker's pod is deleted."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from cluster.node.conftest import NAMESPACE
from support.kubernetes.installation import API_KEY, Installation
from support.tutorials import IN_CLUSTER, executed, pictures, stored_notebook


def test_runs_to_its_end(installation: Installation, session: str, tmp_path: Path) -> None:
    outcome = executed(IN_CLUSTER, tmp_path, _as_after_the_demo(installation, tmp_path))
    assert pictures(outcome) == pictures(stored_notebook(IN_CLUSTER, outcome))


def _as_after_the_demo(installation: Installation, folder: Path) -> dict[str, str]:
    cluster, kubeconfig = installation.cluster, folder / "kubeconfig"
    shutil.copyfile(cluster.kubeconfig, kubeconfig)
    cluster.kubectl(f"--kubeconfig={kubeconfig}", "config", "set-context", "--current", f"--namespace={NAMESPACE}")
    programs = [Path(sys.executable).parent, cluster.kubectl_program.parent]
    return {
        "KUBECONFIG": str(kubeconfig),
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        "TINKER_BASE_URL": installation.url,
        "TINKER_API_KEY": API_KEY,
        "NO_PROXY": "*",
    }
