"""The table in explanation/security.md of who can reach what.

Each row is tried on a real API server, under the accounts of an installation with its defaults, or by the tests that a
row names, where Kubernetes does not decide.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from charts.conftest import Place
from support.kubernetes.api_server import ApiServer
from support.kubernetes.charts import CHART, ROOT, Object
from support.kubernetes.fixtures import new_namespace
from support.kubernetes.installation import wait_for
from testcluster.cluster import Cluster
from testcluster.errors import ClusterError

PAGE = ROOT / "docs" / "explanation" / "security.md"
OPERATOR, API_SERVER = "tinsmith-operator", "tinsmith-api-server"
WRITE = ("create", "update", "patch", "delete")
SERVED = ("trainingsessions.tinsmith.dev", "samplerpools.tinsmith.dev")
VALUES = {
    "crds": {"install": False},
    "apiServer": {"database": {"existingSecret": {"name": "postgresql"}}},
    "checkpoints": {"remote": {"url": "s3://bucket", "secretName": "bucket-keys"}},
}
OWN_SECRETS = (
    "tinsmith-ca",
    "tinsmith-api-server-tls",
    "tinsmith-api-key",
    "tinsmith-given-key",
    "postgresql",
    "bucket-keys",
    "sh.helm.release.v1.tinsmith.v1",
)


@dataclass(frozen=True)
class Installed:
    """A release with its defaults; a user who reads sessions and one who writes them; and a second namespace."""

    place: Place
    elsewhere: str

    def may(self, user: str, verb: str, resource: str, namespace: str | None = None) -> bool:
        return self.place.api.may(user, verb, namespace or self.place.namespace, resource_of(resource))

    def account(self, name: str) -> str:
        return f"system:serviceaccount:{self.place.namespace}:{name}"

    def refuses(self, manifest: Object, words: str) -> None:
        """Return true if the writer is refused."""
        with pytest.raises(ClusterError) as refusal:
            self.write(manifest)
        assert re.search(words, str(refusal.value)), refusal.value

    def write(self, manifest: Object) -> None:
        """Write as the writer, in a dry run."""
        self.place.objects.would_create(manifest, user="writer")


def resource_of(resource: str) -> Object:
    """`pods/log`, `statefulsets.apps`, `trainingsessions.tinsmith.dev/status`."""
    kind, _, subresource = resource.partition("/")
    plural, _, group = kind.partition(".")
    return {"resource": plural, "group": group, "subresource": subresource}


@pytest.fixture(scope="module")
def installed(kinds: Cluster, api_server: ApiServer) -> Iterator[Installed]:
    with new_namespace(kinds) as namespace, new_namespace(kinds) as elsewhere:
        place = Place(kinds, api_server, namespace)
        made = Installed(place, elsewhere)
        try:
            place.helm("install", "tinsmith", str(CHART), values=VALUES)
            grant(place, "reader", ["get", "list", "watch"])
            grant(place, "writer", ["get", "list", "watch", *WRITE])
            wait_for(lambda: is_in_force(made), 60, lambda: "the policy or a right is not in force")
            yield made
        finally:
            policy = f"{place.namespace}-tinsmith-sessions"
            kinds.kubectl("delete", "--ignore-not-found", f"validatingadmissionpolicybinding/{policy}")
            kinds.kubectl("delete", "--ignore-not-found", f"validatingadmissionpolicy/{policy}")


def grant(place: Place, user: str, verbs: list[str]) -> None:
    place.kubectl("create", "role", user, f"--verb={','.join(verbs)}", f"--resource={','.join(SERVED)}")
    place.kubectl("create", "rolebinding", user, f"--role={user}", f"--user={user}")


def is_in_force(installed: Installed) -> bool:
    try:
        installed.write(session())
        installed.write(session(**variable("postgresql")))
    except ClusterError as error:
        return "may not name" in str(error)
    return False


def session(name: str = "probe", /, **spec: Any) -> Object:
    model = model_on("models")["model"]
    return {
        "apiVersion": "tinsmith.dev/v1alpha1",
        "kind": "TrainingSession",
        "metadata": {"name": name},
        "spec": {"model": model, **spec},
    }


def model_on(claim: str) -> Object:
    source = {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": claim}}
    return {"model": {"name": "demo/tiny", "source": source}}


def variable(secret: str) -> Object:
    return {"pod": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": secret, "key": "k"}}}]}}


def token(secret: str) -> Object:
    hub = {"repository": "a/b", "tokenSecretRef": {"name": secret, "key": "key"}}
    return {"model": {"name": "demo/tiny", "source": {"type": "Hub", "hub": hub}}}


# ---- what each row says


def looks_and_no_more(at: Installed) -> None:
    assert all(at.may("reader", verb, kind) for verb in ("get", "list", "watch") for kind in SERVED)
    assert not any(at.may("reader", verb, kind) for verb in WRITE for kind in SERVED)
    bindings = json.loads(at.place.kubectl("get", "rolebindings", "--output=json"))["items"]
    given = {each["name"] for binding in bindings for each in binding["subjects"]}
    assert given == {OPERATOR, API_SERVER, "reader", "writer"}


def reads_nothing_else(user: str, at: Installed) -> None:
    assert not any(at.may(user, "get", kind) for kind in ("secrets", "pods", "pods/log", "configmaps"))
    assert not any(at.may(user, "list", kind) for kind in ("secrets", "pods", "configmaps"))


def runs_any_image(at: Installed) -> None:
    at.write(session(pod={"image": "registry.example.com/any/image:1"}))


def names_what_is_its_own(at: Installed) -> None:
    at.write(session(**variable("mine")))
    at.write(session(**token("mine")))
    at.write(session(**model_on("any-models")))


def writes_all_sessions(at: Installed) -> None:
    assert all(at.may("writer", verb, kind) for verb in WRITE for kind in SERVED)


def names_no_tinsmith_secret(at: Installed) -> None:
    for name in OWN_SECRETS:
        for spec in (variable(name), token(name)):
            at.refuses(session(**spec), "may not name|Secrets of the installation")
    for name in OWN_SECRETS[:-1]:
        at.refuses(session(pod={"imagePullSecrets": [{"name": name}]}), "may not name")


def names_no_tinsmith_claim(at: Installed) -> None:
    for claim in ("tinsmith-api-server-data", "tinsmith-checkpoints"):
        cache = {"engine": "nemo-rl", "modelCache": {"claimName": claim}, "pod": {"image": "any:1"}}
        for spec in (model_on(claim), cache, {"storage": {"existingClaim": claim}}):
            at.refuses(session(**spec), "cannot use claims of the installation|may not name")


def takes_no_tinsmith_account(at: Installed) -> None:
    for account in (OPERATOR, API_SERVER):
        at.refuses(session(pod={"serviceAccountName": account}), "may not name")


def has_no_other_certificate(at: Installed) -> None:
    at.refuses(session(**variable("victim-tls")), "names end in -tls")
    at.refuses(session("tinsmith-api-server"), "or be called after")


def writes_nothing_else(at: Installed) -> None:
    reads_nothing_else("writer", at)
    for kind in ("pods", "statefulsets.apps", "deployments.apps", "jobs.batch", "persistentvolumeclaims"):
        assert not any(at.may("writer", verb, kind) for verb in WRITE)


def operator_works_here(at: Installed) -> None:
    operator = at.account(OPERATOR)
    for kind in ("statefulsets.apps", "deployments.apps", "services", "persistentvolumeclaims", "secrets"):
        assert all(at.may(operator, verb, kind) for verb in ("get", "list", "watch", "create", "patch"))
    for kind in ("networkpolicies.networking.k8s.io", "poddisruptionbudgets.policy"):
        assert all(at.may(operator, verb, kind) for verb in ("create", "patch"))


def operator_writes_states(at: Installed) -> None:
    operator = at.account(OPERATOR)
    assert at.may(operator, "patch", SERVED[0])
    assert at.may(operator, "patch", "trainingsessions.tinsmith.dev/status")
    assert all(at.may(operator, "delete", kind) for kind in SERVED)
    assert at.may(operator, "create", SERVED[0])
    assert not any(at.may(operator, "update", kind) for kind in SERVED)
    assert not any(at.may(operator, verb, SERVED[1]) for verb in ("create", "patch"))
    assert not any(at.may(operator, verb, "sessiontemplates.tinsmith.dev") for verb in WRITE)


def operator_stays_here(at: Installed) -> None:
    operator = at.account(OPERATOR)
    kinds = (*SERVED, "secrets", "pods", "statefulsets.apps", "services", "persistentvolumeclaims")
    for namespace in (at.elsewhere, "default", "kube-system"):
        assert not any(at.may(operator, verb, kind, namespace) for verb in ("get", "list", *WRITE) for kind in kinds)
    bindings = json.loads(at.place.kubectl("get", "clusterrolebindings", "--output=json"))["items"]
    subjects = [each for binding in bindings for each in binding.get("subjects") or ()]
    assert not [each for each in subjects if each.get("namespace") == at.place.namespace]


def operator_is_in_no_pod(at: Installed) -> None:
    operator = at.account(OPERATOR)
    assert not any(
        at.may(operator, "create", kind) for kind in ("pods", "pods/exec", "pods/attach", "pods/portforward")
    )
    assert not at.may(operator, "get", "pods/log")
    assert not at.may(operator, "patch", "pods/ephemeralcontainers")


def operator_gives_no_rights(at: Installed) -> None:
    operator = at.account(OPERATOR)
    for kind in ("roles", "rolebindings", "clusterroles", "clusterrolebindings"):
        verbs = (*WRITE, "bind", "escalate")
        assert not any(at.may(operator, verb, f"{kind}.rbac.authorization.k8s.io") for verb in verbs)
    for kind in ("users", "groups", "serviceaccounts"):
        assert not at.may(operator, "impersonate", kind)
    assert not at.may(operator, "create", "serviceaccounts/token")


def api_server_reads_and_makes_sessions(at: Installed) -> None:
    server = at.account(API_SERVER)
    for kind in (*SERVED, "endpointslices.discovery.k8s.io", "persistentvolumeclaims"):
        assert at.may(server, "list", kind)
    assert all(at.may(server, "patch", f"{kind}/status") for kind in SERVED)
    assert at.may(server, "create", SERVED[0])
    assert not at.may(server, "create", SERVED[0], at.elsewhere)


def api_server_reads_no_secret_and_changes_nothing(at: Installed) -> None:
    server = at.account(API_SERVER)
    assert not any(at.may(server, verb, "secrets") for verb in ("get", "list", "watch", *WRITE))
    assert not any(at.may(server, verb, kind) for verb in ("update", "patch", "delete") for kind in SERVED)
    assert not any(at.may(server, verb, kind) for verb in WRITE for kind in ("pods", "statefulsets.apps"))


def a_namespaces_default_account_may_nothing(at: Installed) -> None:
    reads_nothing_else(at.account("default"), at)
    assert not any(at.may(at.account("default"), verb, kind) for verb in ("get", "list", *WRITE) for kind in SERVED)


@dataclass(frozen=True)
class TriedBy:
    """tests: as `file::name`, from tests/ on."""

    tests: tuple[str, ...]

    def __call__(self, _: Installed) -> None:
        for file, name in (test.split("::") for test in self.tests):
            tree = ast.parse((ROOT / "tests" / file).read_text())
            names = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert name in names, f"tests/{file} has no {name}"


def tried_by(*tests: str) -> TriedBy:
    return TriedBy(tests)


Check = Callable[[Installed], None]
KEY, READER, WRITER = "a holder of an API key", "a reader of sessions and pools", "a writer of sessions and pools"
SERVER, WORKER, REPLICA = "the API server", "a worker, or a pool's replica", "a pool's replica"

# By who, may and how the sentence begins.
CHECKS: dict[tuple[str, str, str], tuple[Check, ...]] = {
    (KEY, "can", "train, sample"): (
        tried_by(
            "sdk/test_checkpoints.py::test_a_resumed_run_continues_bit_for_bit",
            "contract/http/test_access.py::test_no_key_and_unknown_keys_are_401",
        ),
    ),
    (KEY, "cannot", "see that another"): (
        tried_by(
            "attacks/test_isolation.py::test_every_endpoint_answers_for_a_strangers_id_as_for_an_unknown_one",
            "attacks/test_isolation.py::test_no_list_holds_anything_of_another_tenants",
        ),
    ),
    (READER, "can", "read their specs"): (looks_and_no_more,),
    (READER, "cannot", "read a Secret"): (partial(reads_nothing_else, "reader"),),
    (READER, "cannot", "see in a condition"): (
        tried_by(
            "unit/operator/common/test_redaction.py::test_words_are_quoted_of_images_that_the_platform_vouches_for",
            "unit/operator/common/test_redaction.py::test_the_reason_for_a_refused_snapshot_is_redacted_too",
        ),
    ),
    (WRITER, "can", "run any image"): (
        runs_any_image,
        tried_by(
            "unit/operator/build/test_golden.py::test_the_objects_of_a_session_or_pool_are_as_reviewed",
            "cluster/crd/test_validation.py::test_objects_built_for_a_session_are_accepted",
            "cluster/crd/test_pool_validation.py::test_objects_built_for_a_pool_are_accepted",
            "charts/test_admission.py::test_the_refusal_is_one_sentence",
            "cluster/operator/test_reserved_names.py::test_images_and_secrets_that_are_not_listed_run_nothing",
        ),
    ),
    (WRITER, "cannot", "give their pods"): (
        tried_by(
            "charts/test_admission.py::test_the_refusal_is_one_sentence",
            "unit/operator/test_policy.py::test_a_list_of_images_keeps_variables_out_that_load_other_code",
            "unit/operator/test_policy.py::test_a_list_of_images_keeps_words_out_that_load_other_code",
        ),
    ),
    (WRITER, "can", "give these pods"): (names_what_is_its_own,),
    (WRITER, "can", "have these pods"): (
        tried_by(
            "unit/operator/build/test_golden.py::test_the_objects_of_another_kind_differ_as_reviewed",
            "unit/operator/build/test_volumes.py::test_every_mount_has_its_volume",
        ),
    ),
    (WRITER, "can", "stop and delete"): (writes_all_sessions,),
    (WRITER, "cannot", "name a Secret"): (
        names_no_tinsmith_secret,
        tried_by(
            "unit/operator/common/test_blocking_reason.py::"
            "test_a_session_that_names_an_object_of_the_installation_has_no_objects",
            "unit/operator/common/test_blocking_reason.py::"
            "test_a_running_session_that_names_a_reserved_secret_stops_until_the_name_is_removed",
        ),
    ),
    (WRITER, "cannot", "name a claim"): (
        names_no_tinsmith_claim,
        tried_by(
            "cluster/operator/test_reserved_names.py::test_a_journal_in_the_installations_store_is_never_written_to"
        ),
    ),
    (WRITER, "cannot", "run as a ServiceAccount"): (takes_no_tinsmith_account,),
    (WRITER, "cannot", "have the certificate"): (
        has_no_other_certificate,
        tried_by(
            "unit/operator/common/test_blocking_reason.py::test_no_pod_is_made_that_would_mount_the_certificate_of_another"
        ),
    ),
    (WRITER, "cannot", "mount another session's journal"): (
        tried_by(
            "cluster/operator/test_others.py::"
            "test_a_mount_of_anothers_journal_is_refused_and_the_worker_of_that_journal_stays",
        ),
    ),
    (WRITER, "cannot", "read a Secret"): (writes_nothing_else,),
    ("the operator", "can", "write workloads"): (operator_works_here,),
    ("the operator", "can", "write the finalizer"): (operator_writes_states,),
    ("the operator", "cannot", "do anything"): (operator_stays_here,),
    ("the operator", "cannot", "make pods"): (operator_is_in_no_pod,),
    ("the operator", "cannot", "give rights"): (operator_gives_no_rights,),
    ("the operator", "cannot", "call a worker"): (
        tried_by("contract/worker/test_network.py::test_the_operator_may_only_ask_how_it_is_doing"),
    ),
    (SERVER, "can", "read sessions"): (api_server_reads_and_makes_sessions,),
    (SERVER, "cannot", "read Secrets"): (api_server_reads_no_secret_and_changes_nothing,),
    (WORKER, "can", "use its own volume"): (
        tried_by(
            "unit/operator/session/test_claim.py::test_the_worker_is_named_after_its_claim",
            "unit/operator/build/test_golden.py::test_the_objects_of_a_session_or_pool_are_as_reviewed",
        ),
    ),
    (WORKER, "cannot", "call the Kubernetes API"): (
        a_namespaces_default_account_may_nothing,
        tried_by(
            "unit/operator/build/test_golden.py::test_the_objects_of_a_session_or_pool_are_as_reviewed",
            "cluster/node/test_trust.py::test_a_worker_has_no_token_and_writes_nothing_to_its_root",
        ),
    ),
    (REPLICA, "can", "get from a worker"): (
        tried_by(
            "contract/sampler/test_streams_between_pods.py::"
            "test_a_streamed_save_equals_the_save_on_the_root_which_is_not_read",
            "unit/operator/build/test_sampler.py::"
            "test_a_sampler_reaches_the_workers_of_its_namespace_and_workers_reach_no_sampler",
        ),
    ),
    (REPLICA, "cannot", "make any other call"): (
        tried_by(
            "contract/worker/test_network.py::"
            "test_a_sampler_may_only_ask_for_saves_and_no_other_peer_for_any_but_the_api_server",
        ),
    ),
    (WORKER, "cannot", "speak in another"): (
        tried_by("contract/worker/test_network.py::test_a_client_that_expects_another_worker_turns_away"),
    ),
}


def rows() -> list[tuple[str, str, str]]:
    """Return the rows of the table under `Who can reach what`."""
    section = PAGE.read_text().partition("## Who can reach what\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return [(who, may, what) for who, may, what in cells if may in ("can", "cannot")]


ROWS = rows()


def checks_of(row: tuple[str, str, str]) -> tuple[Check, ...]:
    who, may, what = row
    found = [checks for (*place, begins), checks in CHECKS.items() if place == [who, may] and what.startswith(begins)]
    assert len(found) == 1, f"no check, or several, for the row: {row}"
    return found[0]


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(row)[:60] for row in ROWS])
def test_a_row_of_the_page_is_so(installed: Installed, row: tuple[str, str, str]) -> None:
    for check in checks_of(row):
        check(installed)


def test_every_row_has_its_check_and_every_check_its_row() -> None:
    assert len(ROWS) == len(CHECKS) > 20
    for row in ROWS:
        assert checks_of(row)
