"""The chart's policy on a real API server: a session names nothing of the installation's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from charts.conftest import Place
from support.kubernetes.api_server import ApiServer
from support.kubernetes.charts import CHART, Object
from support.kubernetes.fixtures import new_namespace
from support.kubernetes.installation import wait_for
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError

VALUES = {
    "crds": {"install": False},
    "apiServer": {"database": {"existingSecret": {"name": "postgresql"}}},
    "image": {"pullSecrets": ["registry-login"]},
    "sessions": {
        "allowedImages": ["registry.example.com/team/*"],
        "admissionPolicy": {"mayLeaveTemplates": ["system:masters"]},
        "allowedSecrets": ["hub-*", "registry-login", "blue-*"],
    },
}
OWN_IMAGE = "registry.example.com/team/trainer:1"


def owner(kind: str = "TrainingSession", name: str = "probe", /, **spec: Any) -> Object:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": "models"}}
    model = {"name": "demo/tiny", "source": source}
    metadata = {"name": name}
    return {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": kind,
        "metadata": metadata,
        "spec": {"model": model} | spec,
    }


def variable(secret: str) -> Object:
    return {"pod": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": secret, "key": "tls.key"}}}]}}


def token(secret: str) -> Object:
    hub = {"repository": "a/b", "tokenSecretRef": {"name": secret, "key": "key"}}
    return {"model": {"name": "demo/tiny", "source": {"type": "Hub", "hub": hub}}}


def model_on(claim: str) -> Object:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": claim}}
    return {"model": {"name": "demo/tiny", "source": source}}


def vllm(*words: str) -> Object:
    resources = {"limits": {"nvidia.com/gpu": 1}}
    return owner(
        "SamplerPool", engine="vllm", pod={"image": OWN_IMAGE}, resources=resources, serverArguments=list(words)
    )


RESERVED = "which sessions and pools may not name or be called after"
REFUSED: dict[str, tuple[Object, str]] = {
    "the authority's key": (owner(**variable("blue-ca")), f"blue-ca, {RESERVED}"),
    "the authority's key, in a pool": (owner("SamplerPool", **variable("blue-ca")), f"blue-ca, {RESERVED}"),
    "the authority's key, in a template": (owner("SessionTemplate", **variable("blue-ca")), f"blue-ca, {RESERVED}"),
    "the first key": (owner(**variable("blue-api-key")), f"blue-api-key, {RESERVED}"),
    "the first key as a token": (owner(**token("blue-api-key")), f"blue-api-key, {RESERVED}"),
    "the database": (owner(**variable("postgresql")), f"postgresql, {RESERVED}"),
    "the registry's login, to read": (owner(**variable("registry-login")), f"registry-login, {RESERVED}"),
    "the authority as a login": (owner(pod={"imagePullSecrets": [{"name": "blue-ca"}]}), f"blue-ca, {RESERVED}"),
    "a model on the checkpoints": (owner(**model_on("blue-checkpoints")), f"blue-checkpoints, {RESERVED}"),
    "a pool's model on them": (owner("SamplerPool", **model_on("blue-checkpoints")), f"blue-checkpoints, {RESERVED}"),
    "a journal on the checkpoints": (
        owner(storage={"existingClaim": "blue-checkpoints"}),
        f"blue-checkpoints, {RESERVED}",
    ),
    "a cache on the checkpoints": (
        owner(engine="nemo-rl", modelCache={"claimName": "blue-checkpoints"}, pod={"image": OWN_IMAGE}),
        f"blue-checkpoints, {RESERVED}",
    ),
    "the API server's account": (owner(pod={"serviceAccountName": "blue-api-server"}), f"blue-api-server, {RESERVED}"),
    "a name whose certificate is taken": (
        owner("TrainingSession", "blue-api-server"),
        f"blue-api-server-tls, {RESERVED}",
    ),
    "the store": (owner(storage={"existingClaim": "blue-api-server-data"}), "cannot use claims of the installation"),
    "a worker's certificate": (owner(**variable("victim-tls")), "whose names end in -tls"),
    "Helm's record": (owner(**variable("sh.helm.release.v1.blue.v1")), "sessions and pools cannot use Secrets"),
    "an image that is not listed": (owner(pod={"image": "evil.io/x:1"}), "image evil.io/x:1 is not allowed"),
    "a Secret that is not listed": (owner(**variable("others")), "Secret others is not allowed"),
    "a variable that loads code": (
        owner(pod={"env": [{"name": "PYTHONPATH", "value": "/models/x"}]}),
        "PYTHONPATH could load code",
    ),
    "a word that loads code": (vllm("--trust-remote-code"), "--trust-remote-code could load code"),
    "such a word in part": (vllm("--trust_rem"), "--trust_rem could load code"),
    "a login that is not listed": (
        owner(pod={"imagePullSecrets": [{"name": "others"}]}),
        "Secret others is not allowed",
    ),
}
TAKEN: dict[str, Object] = {
    "the least": owner(),
    "the least pool": owner("SamplerPool"),
    "the least template": owner("SessionTemplate"),
    "a token of theirs": owner(**token("hub-token")),
    "a variable of theirs": owner(**variable("hub-token")),
    "a login": owner(pod={"imagePullSecrets": [{"name": "registry-login"}], "image": OWN_IMAGE}),
    "the workers' own image": owner(pod={"image": "tinsmith.local/tinsmith/trainer:0.0.9"}),
    "words of memory and batches": vllm("--gpu-memory-utilization", "0.85", "--max_num_seqs=16", "--seed", "-1"),
    "a plain variable": owner(pod={"env": [{"name": "A", "value": "blue-ca"}]}),
}


@pytest.fixture(scope="module")
def guarded(kinds: Cluster, api_server: ApiServer) -> Iterator[Place]:
    """Install a release called blue, whose policy is in force."""
    with new_namespace(kinds) as namespace:
        place = Place(kinds, api_server, namespace)
        try:
            place.helm("install", "blue", str(CHART), values=VALUES)
            wait_for(lambda: is_in_force(place), 60, lambda: "the policy is not in force")
            yield place
        finally:
            names = (f"{kind}/{policy_of(place)}{ending}" for kind in KINDS for ending in ("", "-copies"))
            kinds.kubectl("delete", "--ignore-not-found", *names)


KINDS = ("validatingadmissionpolicybinding", "validatingadmissionpolicy")


def policy_of(place: Place) -> str:
    return f"{place.namespace}-blue-sessions"


def is_in_force(place: Place) -> bool:
    """Return true if its own message appears: an object that exists already is refused by any API server."""
    try:
        place.objects.would_create(owner(**variable("others")))
    except ClusterError as error:
        return "Secret others is not allowed" in str(error)
    return False


def is_refused(place: Place, manifest: Object) -> str:
    """Return the API server's refusal."""
    try:
        place.objects.would_create(manifest)
    except ClusterError as error:
        return str(error)
    raise AssertionError("the API server takes it")


@pytest.mark.parametrize(("manifest", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_the_refusal_is_one_sentence(guarded: Place, manifest: Object, says: str) -> None:
    assert says in is_refused(guarded, manifest)


@pytest.mark.parametrize("manifest", TAKEN.values(), ids=TAKEN.keys())
def test_objects_of_the_user_are_accepted(guarded: Place, manifest: Object) -> None:
    guarded.objects.would_create(manifest)


def test_a_change_of_the_spec_is_looked_at_and_other_changes_are_not(guarded: Place) -> None:
    """The finalizer of one that was stored before must go, or it could never be deleted."""
    binding = f"{KINDS[0]}/{policy_of(guarded)}"
    stored = guarded.kubectl("get", binding, "--output=json")
    guarded.kubectl("delete", binding)
    wait_for(lambda: not is_in_force(guarded), 60, lambda: "the policy is still in force")
    guarded.kubectl("create", "--filename=-", stdin=json.dumps(owner(**variable("others"))))
    live = json.loads(stored)
    live["metadata"] = {name: live["metadata"][name] for name in ("name", "labels", "annotations")}
    guarded.kubectl("create", "--filename=-", stdin=json.dumps(live))
    wait_for(lambda: is_in_force(guarded), 60, lambda: "the policy is not in force")

    guarded.kubectl("annotate", "tsess", "probe", "tinsmith.dev/restart-requested-at=2026-01-01T00:00:00Z")
    patch = {"spec": {"adapters": {"slots": 3}}}
    with pytest.raises(ClusterError, match="Secret others is not allowed"):
        guarded.kubectl("patch", "tsess", "probe", "--type=merge", f"--patch={json.dumps(patch)}")
    guarded.kubectl("delete", "tsess", "probe")


FROM_TEMPLATE: Object = {**owner(), "spec": {"templateRef": {"name": "tiny"}}}


def test_users_outside_the_named_groups_create_sessions_from_templates_only(guarded: Place) -> None:
    guarded.kubectl("create", "role", "users", "--verb=create", "--resource=trainingsessions.tinsmith.dev")
    guarded.kubectl("create", "rolebinding", "users", "--role=users", "--group=users")
    as_user = ("create", "--dry-run=server", "--filename=-", "--as=alice", "--as-group=users")
    with pytest.raises(ClusterError, match=r"a session needs spec\.templateRef here"):
        guarded.kubectl(*as_user, stdin=json.dumps(owner()))
    guarded.kubectl(*as_user, stdin=json.dumps(FROM_TEMPLATE))


def test_only_the_operator_writes_the_copy_by_which_a_session_runs(guarded: Place) -> None:
    guarded.kubectl("create", "--filename=-", stdin=json.dumps(FROM_TEMPLATE))
    patch = json.dumps({"status": {"template": {"name": "tiny", "generation": 1, "spec": "{}"}}})
    write = ("patch", "tsess", "probe", "--subresource=status", "--type=merge", f"--patch={patch}")
    account = f"--as=system:serviceaccount:{guarded.namespace}:blue"
    # kubectl reads what it patches.
    guarded.kubectl("create", "role", "readers", "--verb=get", "--resource=trainingsessions.tinsmith.dev/status")
    for part in ("api-server", "operator"):
        reader = f"--serviceaccount={guarded.namespace}:blue-{part}"
        guarded.kubectl("create", "rolebinding", f"reader-{part}", "--role=readers", reader)
    with pytest.raises(ClusterError, match=r"only the operator writes status\.template"):
        guarded.kubectl(*write, f"{account}-api-server")
    wanted = '--patch={"status":{"wantedTime":"2026-01-01T00:00:00Z"}}'
    guarded.kubectl(*write[:-1], wanted, f"{account}-api-server")
    guarded.kubectl(*write, f"{account}-operator")
    guarded.kubectl("delete", "tsess", "probe")
