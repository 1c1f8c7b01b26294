"""The rights that the chart gives an operator, for operators that a test starts itself."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import yaml
from support.kubernetes.charts import CHART, HELM, REGISTRY
from support.kubernetes.installation import wait_for
from testcluster.cluster import Cluster

ACCOUNT = "tinsmith-operator"
TEMPLATES = [f"templates/operator/{name}.yaml" for name in ("role", "rolebinding", "serviceaccount")]
ALLOWED_SECONDS = 60.0

Object = dict[str, Any]


def rights_of(namespace: str, **scope: Any) -> list[Object]:
    """Return the account, the roles and the bindings of the chart in that namespace."""
    shown = [word for template in TEMPLATES for word in ("--show-only", template)]
    command = [str(HELM), "template", "tinsmith", str(CHART), "--namespace", namespace, "--values", "-", *shown]
    values = {
        "image": {"registry": REGISTRY},
        "scope": scope,
        "checkpoints": {"remote": {"url": "s3://bucket/checkpoints"}},
    }
    rendered = subprocess.run(command, input=json.dumps(values), capture_output=True, text=True, check=True).stdout
    objects = [each for each in yaml.safe_load_all(rendered) if each is not None]
    for each in objects:
        if not each["kind"].startswith("Cluster"):
            each["metadata"].setdefault("namespace", namespace)
    return objects


def grant(cluster: Cluster, objects: list[Object]) -> None:
    """Grant a right, and wait until the API server applies it, a moment after it has stored it."""
    cluster.kubectl("apply", "--filename=-", stdin=yaml.safe_dump_all(objects))
    roles = {place_of(each): each["rules"] for each in objects if each["kind"] == "Role"}
    for binding in (each for each in objects if each["kind"] == "RoleBinding"):
        namespace = binding["metadata"]["namespace"]
        [subject] = binding["subjects"]
        who = f"--as=system:serviceaccount:{subject['namespace']}:{subject['name']}"
        # All rules of a role come at once.
        rule = roles[namespace, binding["roleRef"]["name"]][0]
        [group, *_], [resource, *_], [verb, *_] = rule["apiGroups"], rule["resources"], rule["verbs"]
        until_allowed(cluster, verb, f"{resource}.{group}", f"--namespace={namespace}", who)


def place_of(named: Object) -> tuple[str, str]:
    return named["metadata"]["namespace"], named["metadata"]["name"]


def until_allowed(cluster: Cluster, *what_and_who: str) -> None:
    # "no" is a status of 1, which is an error that `wait_for` waits out.
    wait_for(lambda: cluster.kubectl("auth", "can-i", *what_and_who), ALLOWED_SECONDS, lambda: " ".join(what_and_who))


def kubeconfig_of_the_account(cluster: Cluster, namespace: str, folder: Path) -> Path:
    """Write a kubeconfig of the operator's service account in that namespace."""
    token = cluster.kubectl(f"--namespace={namespace}", "create", "token", ACCOUNT).strip()
    document = yaml.safe_load(cluster.kubeconfig.read_text())
    document["users"] = [{"name": document["contexts"][0]["context"]["user"], "user": {"token": token}}]
    file = folder / "kubeconfig"
    file.write_text(json.dumps(document))
    return file
