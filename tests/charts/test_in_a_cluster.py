"""The chart on a real API server, which accepts, admits, grants and keeps what it should."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from charts.conftest import Place
from support.kubernetes.api_server import ApiNamespace
from support.kubernetes.charts import CHART, NAMESPACE, ROOT, HelmFailed, Object, notes, render

HERE = Path(__file__).parent
CASES = sorted([*HERE.glob("values/*.yaml"), *ROOT.glob("examples/values-*.yaml")])
ELSEWHERE = ("team-a", "tinsmith-sessions")
SESSION = (ROOT / "examples" / "session.yaml").read_text()
OPERATOR, API_SERVER = "tinsmith-operator", "tinsmith-api-server"
KEPT_CLAIMS = ("tinsmith-api-server-data", "tinsmith-checkpoints")


def pod_of(workload: Object) -> Object:
    template = workload["spec"]["template"]
    metadata = {**template["metadata"], "name": workload["metadata"]["name"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_every_object_would_be_accepted_where_pods_must_be_restricted(shared_objects: ApiNamespace, case: Path) -> None:
    objects = [each for each in render(yaml.safe_load(case.read_text())) if each["kind"] != "CustomResourceDefinition"]
    with ExitStack() as held:
        for each in objects:
            # Bindings name their account's namespace; what is for another one is tried here as well.
            text = json.dumps(each)
            for elsewhere in (NAMESPACE, *ELSEWHERE):
                text = text.replace(f'"{elsewhere}"', f'"{shared_objects.name}"')
            shared_objects.would_create(json.loads(text))
            if each["kind"] in ("ServiceAccount", "PriorityClass"):
                held.enter_context(shared_objects.holding(json.loads(text)))
        workloads = [each for each in objects if each["kind"] == "Deployment"]
        assert len(workloads) == 2
        for each in workloads:
            shared_objects.would_create(pod_of(each))


def test_installing_makes_pods_and_says_what_to_do_next(place: Place) -> None:
    said = place.install().partition("\nNOTES:\n")[2]
    for component in ("operator", "api-server"):
        place.kubectl("wait", "pod", "-l", f"app.kubernetes.io/component={component}", "--for=create", "--timeout=60s")
    assert said.strip() == notes({}).replace(NAMESPACE, place.namespace).strip()


def test_uninstalling_keeps_volumes_definition_and_sessions_for_the_next_installation(place: Place) -> None:
    place.install()
    place.kubectl("create", "--filename=-", stdin=SESSION)
    claims = {name: place.uid("pvc", name) for name in KEPT_CLAIMS}
    session = place.uid("trainingsession", "tiny")

    place.helm("uninstall", "tinsmith")
    left = place.kubectl(
        "get", "deploy,svc,cm,secret,role,rolebinding,networkpolicy,ingress,pdb", "--output=name"
    ).split()
    assert left == ["configmap/kube-root-ca.crt"]
    assert place.uid("trainingsession", "tiny") == session
    for plural in ("trainingsessions", "samplerpools", "sessiontemplates"):
        place.kubectl("get", "crd", f"{plural}.tinsmith.dev")

    # Without taking anything over: what was kept is this release's own.
    place.helm("install", "tinsmith", str(CHART), values={})
    assert {name: place.uid("pvc", name) for name in KEPT_CLAIMS} == claims
    assert place.uid("trainingsession", "tiny") == session


def test_a_second_release_explains_how_to_share_the_definitions_and_each_way_works(
    place: Place, another_namespace: str
) -> None:
    place.install()
    second = replace(place, namespace=another_namespace)
    with pytest.raises(HelmFailed) as refused:
        second.helm("install", "tinsmith", str(CHART), values={})
    assert f"installed by the release tinsmith of the namespace {place.namespace}" in str(refused.value)
    assert "pass --set crds.install=false to use them as they are" in str(refused.value)
    assert "--take-ownership --set crds.takeOwnership=true to let this release manage them" in str(refused.value)

    without = {"crds": {"install": False}, "sessions": {"admissionPolicy": {"enabled": False}}}
    second.helm("install", "tinsmith", str(CHART), values=without)
    second.helm("uninstall", "tinsmith")
    second.install({"sessions": {"admissionPolicy": {"enabled": False}}})
    owner = "--output=jsonpath={.metadata.annotations.meta\\.helm\\.sh/release-namespace}"
    assert place.kubectl("get", "crd", "trainingsessions.tinsmith.dev", owner) == another_namespace


def test_definitions_that_no_release_installed_are_recognized(place: Place) -> None:
    place.kubectl(
        "annotate",
        "crd",
        "trainingsessions.tinsmith.dev",
        "meta.helm.sh/release-name-",
        "meta.helm.sh/release-namespace-",
    )
    with pytest.raises(HelmFailed, match="installed by no Helm release"):
        place.helm("install", "tinsmith", str(CHART), values={})


@pytest.mark.parametrize("case", ["default", "everything", "values-high-availability"])
def test_a_gitops_tool_renders_the_objects_that_helm_installs(place: Place, case: str) -> None:
    """Its objects take nothing from the cluster, do not depend on its features, and are the same each time."""
    [file] = [each for each in CASES if each.stem == case]
    values = {**yaml.safe_load(file.read_text()), "crds": {"install": False}}
    rendered = render(values, namespace=place.namespace)
    place.install(values)
    installed = yaml.safe_load_all(place.helm("get", "manifest", "tinsmith"))
    hooks = [each for each in rendered if "helm.sh/hook" in each["metadata"].get("annotations", {})]
    assert [each["kind"] for each in hooks] == ["Pod"]
    assert by_name(each for each in rendered if each not in hooks) == by_name(each for each in installed if each)


def by_name(objects: Iterable[Object]) -> dict[tuple[str, str], Object]:
    return {(each["kind"], each["metadata"]["name"]): each for each in objects}


def test_a_new_definition_comes_with_an_upgrade(place: Place) -> None:
    place.install()
    versions = "/spec/versions/0/additionalPrinterColumns"
    patch = json.dumps([{"op": "remove", "path": versions}])
    place.kubectl("patch", "crd", "trainingsessions.tinsmith.dev", "--type=json", f"--patch={patch}")
    place.helm("upgrade", "tinsmith", str(CHART))
    columns = place.kubectl("get", "crd", "trainingsessions.tinsmith.dev", "--output=jsonpath={.spec.versions[0]}")
    assert "additionalPrinterColumns" in columns


def test_a_release_goes_over_to_a_database_with_several_servers_and_back(place: Place) -> None:
    def deployed() -> tuple[int, str]:
        spec = json.loads(place.kubectl("get", "deploy", API_SERVER, "--output=json"))["spec"]
        return spec["replicas"], spec["strategy"]["type"]

    database = {"apiServer": {"replicas": 2, "database": {"existingSecret": {"name": "postgresql"}}}}
    place.install({})
    assert deployed() == (1, "Recreate")
    place.helm("upgrade", "tinsmith", str(CHART), values=database)
    assert deployed() == (2, "RollingUpdate")
    place.kubectl("get", "pdb", API_SERVER)
    # The file is kept for the way back.
    place.helm("upgrade", "tinsmith", str(CHART), "--reset-values", values={})
    assert deployed() == (1, "Recreate")
    assert place.uid("pvc", KEPT_CLAIMS[0])


def test_templates_take_nothing_from_the_cluster_and_write_by_no_hook_but_the_test() -> None:
    templates = {path: path.read_text() for path in (CHART / "templates").rglob("*") if path.is_file()}
    for word in (r"\.Capabilities", "rand[A-Z]", "genCA", "genSelfSigned", "now", "uuidv4"):
        used = re.compile(rf"{{{{[^}}]*(?<![\w.]){word}")
        assert [path.name for path, text in templates.items() if used.search(text)] == [], word
    # A check refuses an installation, and changes nothing that is rendered.
    assert {path.name: text.count("lookup ") for path, text in templates.items() if "lookup " in text} == {
        "_checks.tpl": 1
    }
    assert [path.name for path, text in templates.items() if "helm.sh/hook:" in text] == ["step.yaml"]


def test_the_accounts_may_do_their_work_in_their_namespace_and_nothing_elsewhere(place: Place) -> None:
    place.install()
    assert place.may(OPERATOR, "create", "statefulsets.apps")
    assert place.may(OPERATOR, "patch", "trainingsessions.tinsmith.dev")
    assert place.may(OPERATOR, "create", "deployments.apps")
    assert place.may(API_SERVER, "create", "trainingsessions.tinsmith.dev")
    assert place.may(API_SERVER, "watch", "endpointslices.discovery.k8s.io")

    assert not place.may(API_SERVER, "patch", "trainingsessions.tinsmith.dev")
    assert not place.may(API_SERVER, "get", "secrets")
    assert not place.may(OPERATOR, "create", "pods")
    for account in (OPERATOR, API_SERVER):
        assert not place.may(account, "list", "trainingsessions.tinsmith.dev", namespace="default")
        assert not place.may(account, "get", "secrets", namespace="default")


def test_the_accounts_may_do_their_work_in_the_namespaces_of_the_scope_and_nothing_elsewhere(
    place: Place, another_namespace: str
) -> None:
    scope = {"scope": {"namespaces": [another_namespace]}, "checkpoints": {"remote": {"url": "s3://bucket"}}}
    place.install(scope)
    assert place.may(OPERATOR, "create", "deployments.apps", namespace=another_namespace)
    assert place.may(API_SERVER, "create", "trainingsessions.tinsmith.dev", namespace=another_namespace)
    assert place.may(API_SERVER, "list", "endpointslices.discovery.k8s.io", namespace=another_namespace)
    assert place.may(OPERATOR, "get", "secrets/tinsmith-ca")

    assert not place.may(OPERATOR, "list", "secrets")
    assert not place.may(API_SERVER, "list", "trainingsessions.tinsmith.dev")
    for account in (OPERATOR, API_SERVER):
        assert not place.may(account, "list", "trainingsessions.tinsmith.dev", namespace="default")
