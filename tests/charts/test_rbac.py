"""The rights of the chart's accounts: each verb because of a call, and none without."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from support.kubernetes.charts import Object, environment, merged, named, pods, render

READ = ("get", "list", "watch")

# What operator/tinsmith_operator calls for sessions and pools. Watching is listing first; `get` looks after a conflict.
OPERATOR = {
    "tinsmith.dev/trainingsessions": {
        *READ,
        "create",
        "patch",
        "delete",
    },  # warm ones, finalizers, idle ones
    "tinsmith.dev/sessiontemplates": set(READ),
    "tinsmith.dev/sessiontemplates/status": {"patch"},
    "tinsmith.dev/samplerpools": {*READ, "delete"},
    "tinsmith.dev/trainingsessions/status": {"patch"},
    "tinsmith.dev/samplerpools/status": {"patch"},
    "tinsmith.dev/trainingsessions/finalizers": {"update"},  # owner references that block their owner's deletion
    "tinsmith.dev/samplerpools/finalizers": {"update"},
    "apps/statefulsets": {*READ, "create", "patch", "delete"},
    "batch/jobs": {*READ, "create", "delete"},
    "ray.io/rayclusters": {*READ, "create", "patch", "delete"},
    "apps/deployments": {*READ, "create", "patch"},
    "policy/poddisruptionbudgets": {*READ, "create", "patch"},
    "/services": {*READ, "create", "patch"},
    "/secrets": {*READ, "create", "patch"},
    "networking.k8s.io/networkpolicies": {*READ, "create", "patch"},
    "/persistentvolumeclaims": {*READ, "create", "patch", "delete"},
    "/pods": {*READ, "delete"},
    "/events": {"get", "list", "create", "patch"},
}
# And for itself: its Lease, its authority, the API server's certificate, the first key.
OPERATOR_OWN = {
    "coordination.k8s.io/leases": {"create"},
    "coordination.k8s.io/leases: tinsmith-operator": {"get", "update"},
    "/secrets": {"create"},
    "/secrets: tinsmith-ca": {"get", "patch"},
    "/secrets: tinsmith-api-server-tls": {"get", "patch"},
    "/secrets: tinsmith-api-key": {"get", "patch"},
}

# What api_server/tinsmith_server/fleet calls.
API_SERVER = {
    "tinsmith.dev/trainingsessions": {"list", "watch"},
    "tinsmith.dev/samplerpools": {"list", "watch"},
    "tinsmith.dev/trainingsessions/status": {"patch"},  # wake requests
    "tinsmith.dev/samplerpools/status": {"patch"},
    "discovery.k8s.io/endpointslices": {"list", "watch"},
    "/persistentvolumeclaims": {"list"},
}
TEMPLATES = {"tinsmith.dev/trainingsessions": {"create"}, "tinsmith.dev/sessiontemplates": {"list", "watch"}}

EVERYWHERE = "the whole cluster"
REMOTE = {"checkpoints": {"remote": {"url": "s3://bucket"}}}
Rights = dict[str, dict[str, set[str]]]


def rights(objects: list[Object], component: str) -> Rights:
    """Verbs by `group/resource`, or by `group/resource: name`; by the namespace that bindings give them in."""
    account = {"kind": "ServiceAccount", "name": f"tinsmith-{component}", "namespace": "research"}
    found: Rights = {}
    for binding in (each for each in objects if each["kind"].endswith("RoleBinding")):
        if binding["subjects"] != [account]:
            continue
        role = bound_role(objects, binding)
        place = binding["metadata"]["namespace"] if role["kind"] == "Role" else EVERYWHERE
        for target, verbs in granted(role).items():
            found.setdefault(place, {}).setdefault(target, set()).update(verbs)
    return found


def bound_role(objects: list[Object], binding: Object) -> Object:
    """Return the role of the same reach as its binding, in the same namespace."""
    reference = binding["roleRef"]
    assert reference["kind"] == binding["kind"].removesuffix("Binding")
    role = one(objects, reference["kind"], reference["name"], binding["metadata"].get("namespace"))
    assert binding["metadata"].keys() == role["metadata"].keys()
    return role


def one(objects: list[Object], kind: str, name: str, namespace: str | None) -> Object:
    wanted = (kind, name, namespace)
    [found] = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) == wanted
    ]
    return found


def granted(role: Object) -> dict[str, set[str]]:
    verbs: dict[str, set[str]] = {}
    for rule in role["rules"]:
        for target in targets(rule):
            verbs.setdefault(target, set()).update(rule["verbs"])
    return verbs


def targets(rule: Object) -> Iterable[str]:
    for group in rule["apiGroups"]:
        for resource in rule["resources"]:
            for name in rule.get("resourceNames", [None]):
                yield f"{group}/{resource}" + (f": {name}" if name else "")


def united(*each: dict[str, set[str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for verbs_of in each:
        for target, verbs in verbs_of.items():
            found.setdefault(target, set()).update(verbs)
    return found


SCOPES = {
    "own": {},
    "own and another": {"scope": {"namespaces": ["team-a", "research"]}, **REMOTE},
    "others": {"scope": {"namespaces": ["team-a", "team-b"]}, **REMOTE},
    "cluster": {"scope": {"cluster": True}, **REMOTE},
}
OPERATOR_RIGHTS: dict[str, Rights] = {
    "own": {"research": united(OPERATOR, OPERATOR_OWN)},
    "own and another": {"research": united(OPERATOR, OPERATOR_OWN), "team-a": OPERATOR},
    "others": {"research": OPERATOR_OWN, "team-a": OPERATOR, "team-b": OPERATOR},
    "cluster": {"research": OPERATOR_OWN, EVERYWHERE: OPERATOR},
}
API_SERVER_RIGHTS: dict[str, Rights] = {
    "own": {"research": united(API_SERVER, TEMPLATES)},
    "own and another": {"research": united(API_SERVER, TEMPLATES), "team-a": API_SERVER},
    "others": {"team-a": united(API_SERVER, TEMPLATES), "team-b": API_SERVER},
    "cluster": {"research": TEMPLATES, EVERYWHERE: API_SERVER},
}


@pytest.mark.parametrize("scope", SCOPES)
def test_the_accounts_have_exactly_the_rights_of_their_calls(scope: str) -> None:
    objects = render(SCOPES[scope])
    assert rights(objects, "operator") == OPERATOR_RIGHTS[scope]
    assert rights(objects, "api-server") == API_SERVER_RIGHTS[scope]


@pytest.mark.parametrize("scope", SCOPES)
def test_every_role_is_bound_to_an_account_of_the_release_that_a_pod_runs_under(scope: str) -> None:
    objects = render(SCOPES[scope])
    roles = [each for each in objects if each["kind"] in ("Role", "ClusterRole")]
    bindings = [each for each in objects if each["kind"] in ("RoleBinding", "ClusterRoleBinding")]
    bound = [(each["roleRef"]["name"], each["metadata"].get("namespace")) for each in bindings]
    assert sorted(bound, key=str) == sorted(
        ((each["metadata"]["name"], each["metadata"].get("namespace")) for each in roles), key=str
    )
    accounts = {pod["serviceAccountName"] for name, pod in pods(objects).items() if name.startswith("Deployment")}
    assert {subject["name"] for each in bindings for subject in each["subjects"]} == accounts


@pytest.mark.parametrize("scope", [name for name in SCOPES if name != "cluster"])
def test_only_the_scope_of_a_whole_cluster_makes_anything_for_it_but_the_definitions(scope: str) -> None:
    entrance = {"apiServer": {"ingress": {"enabled": True}}}
    kinds = {each["kind"] for each in render(merged(SCOPES[scope], entrance))}
    assert {kind for kind in kinds if kind.startswith("Cluster")} == set()
    assert kinds - {"CustomResourceDefinition", *SWITCHED} <= NAMESPACED
    assert {each["kind"] for each in render(merged(SCOPES[scope], SWITCHED_OFF))} & SWITCHED == set()


SWITCHED = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "PriorityClass"}
SWITCHED_OFF = {"sessions": {"admissionPolicy": {"enabled": False}}, "priorityClass": {"create": False}}
NAMESPACED = {
    "ConfigMap",
    "Deployment",
    "Ingress",
    "NetworkPolicy",
    "PersistentVolumeClaim",
    "Pod",
    "Role",
    "RoleBinding",
    "Secret",
    "Service",
    "ServiceAccount",
}


def test_only_rights_are_given_outside_the_release_s_namespace() -> None:
    elsewhere = [
        each for each in render(SCOPES["others"]) if each["metadata"].get("namespace", "research") != "research"
    ]
    assert {each["kind"] for each in elsewhere} == {"Role", "RoleBinding"}
    assert {each["metadata"]["namespace"] for each in elsewhere} == {"team-a", "team-b"}


def test_releases_of_one_name_in_several_namespaces_name_their_cluster_roles_apart() -> None:
    names = {each["metadata"]["name"] for each in render(SCOPES["cluster"]) if each["kind"] == "ClusterRole"}
    assert names == {"research-tinsmith-operator", "research-tinsmith-api-server"}


@pytest.mark.parametrize("keys", [{"value": "tml-a-key-of-our-own-choosing"}, {"existingSecret": {"name": "ours"}}])
def test_an_operator_that_makes_no_key_may_touch_none(keys: Object) -> None:
    objects = render({"keys": keys})
    targets_of = granted(named(objects, "Role", "tinsmith-operator-installation"))
    assert [target for target in targets_of if "-key" in target or "ours" in target] == []
    assert "TINSMITH_OPERATOR_FIRST_KEY_SECRET" not in environment(pods(objects)["Deployment tinsmith-operator"])


def test_two_releases_of_a_namespace_share_one_lease_so_that_one_operator_acts() -> None:
    """Otherwise they would give the same workers certificates of two authorities in turn, without end."""
    other = render({}, release="second")
    told = environment(pods(other)["Deployment second-operator"])
    assert told["TINSMITH_OPERATOR_LEASE_NAME"] == "tinsmith-operator"
    leases = granted(named(other, "Role", "second-operator-installation"))
    assert leases["coordination.k8s.io/leases: tinsmith-operator"] == {"get", "update"}
