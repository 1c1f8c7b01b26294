"""The output of `status`, `why` and `report` for objects of a real API server, and the rights that they need."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from cluster.plugin.conftest import Plugin
from support.kubernetes.chart_account import until_allowed
from support.kubernetes.families import unready
from support.kubernetes.fixtures import Cluster
from support.operator.operators import session_manifest
from tinsmith.cluster.families import Kind
from tinsmith.cluster.kubectl import Access, ClusterUnreachable, KindUnknown, Kubectl, KubectlFailed, NotFound

CURE = "No node takes the pod: 0/1 nodes are available; add a node that fits."
SECRET = "hunter2-of-ada"
DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def pending(api_cluster: Cluster, plugin: Plugin, namespace: str) -> Plugin:
    """Return a session whose pod finds no node, with a secret in its spec, and its children."""
    inside = f"--namespace={namespace}"
    labels = {"app.kubernetes.io/managed-by": "tinsmith-operator", "tinsmith.dev/session": "tiny"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "tiny-0", "labels": labels},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "worker",
                    "image": "tinsmith.local/tinsmith/trainer:0.1.0",
                    "env": [{"name": "WANDB_API_KEY", "value": SECRET}],
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        },
    }
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "tiny-0.one"},
        "involvedObject": {"kind": "Pod", "name": "tiny-0", "namespace": namespace},
        "type": "Warning",
        "reason": "FailedScheduling",
        "message": "0/1 nodes are available",
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    manifests = {"apiVersion": "v1", "kind": "List", "items": [session_manifest(), pod, event]}
    api_cluster.kubectl(inside, "apply", "--filename=-", stdin=json.dumps(manifests))
    status = {"status": {"observedGeneration": 1, "conditions": unready("Unschedulable", CURE, moving=True)}}
    api_cluster.kubectl(
        inside, "patch", "tsess", "tiny", "--subresource=status", "--type=merge", f"--patch={json.dumps(status)}"
    )
    return plugin


def test_status_shows_the_session_and_its_children(pending: Plugin) -> None:
    said = pending("status")
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith(f"session/tiny, not ready: Unschedulable\n├─ {CURE}\n")
    assert "pod/tiny-0 on no node, Pending, not ready, 0 restarts" in said.out


def test_why_gives_the_cure_and_then_the_evidence(pending: Plugin) -> None:
    said = pending("why", "tiny")
    assert said.out.splitlines()[:2] == ["TrainingSession tiny is not ready: Unschedulable", CURE]
    assert "warning FailedScheduling of pod/tiny-0: 0/1 nodes are available" in said.out


def test_a_report_of_it_has_its_files_and_not_its_secret(pending: Plugin, tmp_path: Path) -> None:
    file = tmp_path / "help.tar.gz"
    assert pending("report", "tiny", f"--output={file}").status == 0
    with tarfile.open(file) as archive:
        contents = {entry.name: (archive.extractfile(entry) or pytest.fail(entry.name)).read() for entry in archive}
    assert not [name for name, content in contents.items() if SECRET.encode() in content]
    assert any(name.endswith("/session-tiny/trainingsession-tiny.json") for name in contents)
    index = contents["help/INDEX.md"].decode()
    assert "the log of tiny-0" not in index, "its container has never started, so there is no log to miss"


def test_a_report_has_only_names_and_sizes_of_secrets(
    api_cluster: Cluster, pending: Plugin, namespace: str, tmp_path: Path
) -> None:
    manifest = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "tiny-tls", "labels": {"app.kubernetes.io/managed-by": "tinsmith-operator"}},
        "stringData": {"tls.key": SECRET},
    }
    api_cluster.kubectl(f"--namespace={namespace}", "apply", "--filename=-", stdin=json.dumps(manifest))
    file = tmp_path / "help.tar.gz"
    pending("report", f"--output={file}")
    with tarfile.open(file) as archive:
        listed = archive.extractfile("help/secrets/workers.txt")
        assert listed is not None
        assert listed.read().decode() == f"{namespace}/tiny-tls Opaque tls.key:20\n"


@pytest.fixture
def onlooker(api_cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """Write the kubeconfig of an account with the built-in role `view` and the rights in docs/reference/kubectl.md."""
    page = (DOCS / "reference" / "kubectl.md").read_text()
    [role] = [part for part in page.split("```yaml\n")[1:] if "aggregate-to-view" in part]
    api_cluster.kubectl("apply", "--filename=-", stdin=role.partition("```")[0])
    inside = f"--namespace={namespace}"
    api_cluster.kubectl(inside, "create", "serviceaccount", "onlooker")
    account = f"--serviceaccount={namespace}:onlooker"
    api_cluster.kubectl(inside, "create", "rolebinding", "onlooker", "--clusterrole=view", account)
    token = api_cluster.kubectl(inside, "create", "token", "onlooker").strip()
    document = yaml.safe_load(api_cluster.kubeconfig.read_text())
    document["users"] = [{"name": document["contexts"][0]["context"]["user"], "user": {"token": token}}]
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(document))
    for kind in ("trainingsessions.tinsmith.dev", "samplerpools.tinsmith.dev"):
        # A controller adds the rules of a new role to `view`.
        until_allowed(api_cluster, "list", kind, inside, f"--as=system:serviceaccount:{namespace}:onlooker")
    yield file
    api_cluster.kubectl("delete", "--filename=-", stdin=role.partition("```")[0])


def test_the_role_view_is_enough_to_look(pending: Plugin, onlooker: Path) -> None:
    for words in (("status",), ("why", "tiny")):
        said = pending(*words, kubeconfig=onlooker)
        assert (said.status, said.err) == (0, "")
        assert "not shown" not in said.out
        assert CURE in said.out


def test_a_user_with_read_rights_sees_which_action_is_not_allowed(
    pending: Plugin, onlooker: Path, tmp_path: Path
) -> None:
    said = pending("suspend", "tiny", kubeconfig=onlooker)
    assert said.status == 1
    assert "Your rights do not allow it" in said.err
    file = tmp_path / "help.tar.gz"
    assert pending("report", f"--output={file}", kubeconfig=onlooker).status == 0
    with tarfile.open(file) as archive:
        index = archive.extractfile("help/INDEX.md")
        assert index is not None
        assert "secrets of the workers: Your rights do not allow it" in index.read().decode()


def test_the_words_of_a_real_kubectl_are_understood(api_cluster: Cluster, kinds: None, namespace: str) -> None:
    access = Access(namespace=namespace, kubeconfig=str(api_cluster.kubeconfig))
    program = str(api_cluster.kubectl_program)
    with pytest.raises(KindUnknown, match="install Tinsmith's chart"):
        Kubectl(access, program=program).find("evaluations.tinsmith.dev")
    with pytest.raises(NotFound):
        Kubectl(access, program=program).get("pods", "nobody")
    with pytest.raises(ClusterUnreachable, match="--context"):
        Kubectl(replace(access, context="nowhere"), program=program).find("pods")
    inside = f"--namespace={namespace}"
    api_cluster.kubectl(inside, "apply", "--filename=-", stdin=json.dumps(session_manifest("odd")))
    with pytest.raises(KubectlFailed, match=r"spec\.suspend"):
        Kubectl(access, program=program).merge_patch(Kind.SESSION.resource, "odd", {"spec": {"suspend": "perhaps"}})
