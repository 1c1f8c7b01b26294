"""The fields of a spec that sessions and pools may use under a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.operator.resources import FROM_HUB, IMAGE, make_pool, make_session
from tinsmith_operator.api.reasons import Reason
from tinsmith_operator.api.references import references_of
from tinsmith_operator.policy import LOADER_VARIABLES, SERVER_ARGUMENTS, Policy, Reserved

ROOT = Path(__file__).parents[3]

OWN = Reserved(
    secrets=frozenset({"blue-ca", "blue-api-server-tls", "blue-api-key", "postgresql", "store", "victim-sampler-tls"}),
    pull_secrets=frozenset({"registry-login"}),
    claims=frozenset({"blue-checkpoints", "blue-data", "eve-journal"}),
    accounts=frozenset({"blue-operator", "blue-api-server"}),
)


def variable(secret: str) -> dict[str, Any]:
    return {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": secret, "key": "k"}}}]}


def token(secret: str) -> dict[str, Any]:
    return {"type": "Hub", "hub": {**FROM_HUB["hub"], "tokenSecretRef": {"name": secret, "key": "k"}}}


def on_claim(claim: str) -> dict[str, Any]:
    return {"type": "PersistentVolumeClaim", "persistentVolumeClaim": {"claimName": claim}}


RESERVED: dict[str, tuple[dict[str, Any], str]] = {
    "the authority in a variable": ({"pod": variable("blue-ca")}, "blue-ca (variable A of spec.pod.env)"),
    "the first key in a variable": ({"pod": variable("blue-api-key")}, "Secret blue-api-key"),
    "the database's URL in a variable": ({"pod": variable("postgresql")}, "Secret postgresql"),
    "the bucket's keys in a variable": ({"pod": variable("store")}, "Secret store"),
    "the registry's login in a variable": ({"pod": variable("registry-login")}, "Secret registry-login"),
    "another worker's certificate": ({"pod": variable("victim-tls")}, "Secret victim-tls"),
    "Helm's values": ({"pod": variable("sh.helm.release.v1.blue.v3")}, "Secret sh.helm.release.v1.blue.v3"),
    "a key as a token": ({"source": token("blue-api-key")}, "blue-api-key (spec.model.source.hub.tokenSecretRef)"),
    "the authority as a login": ({"pod": {"imagePullSecrets": [{"name": "blue-ca"}]}}, "(spec.pod.imagePullSecrets)"),
    "a model on the checkpoints": ({"source": on_claim("blue-checkpoints")}, "PersistentVolumeClaim blue-checkpoints"),
    "a model in the store": ({"source": on_claim("any-api-server-data")}, "any-api-server-data (spec.model.source"),
    "the operator's account": ({"pod": {"serviceAccountName": "blue-operator"}}, "ServiceAccount blue-operator"),
}
OF_SESSIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a journal in the store": ({"storage": {"existingClaim": "blue-data"}}, "blue-data (spec.storage.existingClaim)"),
    "a cache on the checkpoints": ({"modelCache": {"claimName": "blue-checkpoints"}}, "(spec.modelCache.claimName)"),
    "a name whose certificate would be the API server's": ({"name": "blue-api-server"}, "blue-api-server-tls"),
    "a name whose journal would be the installation's": ({"name": "eve"}, "eve-journal (metadata.name)"),
}


@pytest.mark.parametrize(("spec", "words"), (RESERVED | OF_SESSIONS).values(), ids=(RESERVED | OF_SESSIONS).keys())
def test_a_session_names_nothing_of_the_installation(spec: dict[str, Any], words: str) -> None:
    objection = Policy(IMAGE, OWN).objection(references_of(make_session(**spec)))
    assert objection is not None
    assert (objection.reason, words in objection.words) == (Reason.NAME_RESERVED, True), objection.words


@pytest.mark.parametrize(("spec", "words"), RESERVED.values(), ids=RESERVED.keys())
def test_a_pool_names_nothing_of_the_installation(spec: dict[str, Any], words: str) -> None:
    objection = Policy(IMAGE, OWN).objection(references_of(make_pool(**spec)))
    assert objection is not None
    assert (objection.reason, words in objection.words) == (Reason.NAME_RESERVED, True), objection.words


def test_a_pool_is_not_called_after_a_secret_of_the_installation() -> None:
    assert Policy(IMAGE, OWN).objection(references_of(make_pool("victim"))) is not None


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"source": token("hub")},
        {"pod": {"imagePullSecrets": [{"name": "registry-login"}]}},
        {"pod": {**variable("tls-settings"), "serviceAccountName": "reads-a-bucket", "image": "ghcr.io/team/any:1"}},
    ],
    ids=["the least", "a token of theirs", "pulling as the installation does", "an account and an image of theirs"],
)
def test_a_session_may_name_objects_of_its_user(spec: dict[str, Any]) -> None:
    assert Policy(IMAGE, OWN).objection(references_of(make_session(**spec))) is None


@pytest.mark.parametrize(
    ("image", "allowed", "may"),
    [
        ("ghcr.io/team/trainer:1", ("*",), True),
        ("ghcr.io/team/trainer:1", (), False),
        ("ghcr.io/team/trainer:1", ("ghcr.io/team/*",), True),
        ("ghcr.io/team/deep/trainer@sha256:ab", ("ghcr.io/team/*",), True),
        ("ghcr.io/team/trainer:1@sha256:ab", ("ghcr.io/team/trainer",), True),
        ("ghcr.io/team/trainer-of-others:1", ("ghcr.io/team/trainer",), False),
        ("ghcr.io:5000/evil", ("ghcr.io",), False),
        ("ghcr.io/team/trainer:1", ("ghcr.io/team/trainer:2",), False),
        ("evil.io/ghcr.io/team/trainer", ("ghcr.io/team/*",), False),
        ("tinsmith.local/tinsmith/trainer:other", (), True),
        ("tinsmith/trainer@sha256:ab", (), False),
        ("tinsmith.local/tinsmith/trainer-nemo-rl:1", (), False),
        ("evil.io/tinsmith.local/tinsmith/trainer:1", (), False),
        ("tinsmith.local/tinsmith/trainer:1\nevil.io/x", (), False),
    ],
)
def test_images_can_be_limited_to_a_list_and_the_workers_own(image: str, allowed: tuple[str, ...], may: bool) -> None:
    policy = Policy("tinsmith.local/tinsmith/trainer:0.1.0", allowed_images=allowed)
    assert policy.allows_image(image) is may
    objection = policy.objection(references_of(make_session(pod={"image": image})))
    assert (objection.reason if objection else None) == (None if may else Reason.IMAGE_NOT_ALLOWED)


VLLM: dict[str, Any] = {
    "engine": "vllm",
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "pod": {"image": "ghcr.io/team/vllm:1"},
}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "PYTHONPATH",
            "PYTHONSTARTUP",
            "LD_PRELOAD",
            "BASH_ENV",
            "ENV",
            "VLLM_PLUGINS",
            "SGLANG_EXTERNAL_MODEL_PACKAGE",
        ),
        *("RAY_RUNTIME_ENV_HOOK", "HF_ENDPOINT", "PATH", "OPENSSL_CONF", "TRITON_CACHE_DIR", "NCCL_NET_PLUGIN", "CC"),
        *("CUDA_INJECTION64_PATH", "OMP_TOOL_LIBRARIES", "TORCH_EXTENSIONS_DIR", "GCONV_PATH"),
        *("XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE", "SGL_DG_CACHE_DIR", "DG_JIT_CACHE_DIR", "NUMBA_CACHE_DIR"),
        *("CUDA_CACHE_PATH", "TVM_LIBRARY_PATH", "UCX_MODULE_DIR", "FI_PROVIDER_PATH"),
    ],
)
def test_a_list_of_images_keeps_variables_out_that_load_other_code(name: str) -> None:
    references = list(references_of(make_session(pod={"env": [{"name": name, "value": "/models/x"}]})))
    objection = Policy(IMAGE, allowed_images=("ghcr.io/team/*",)).objection(references)
    assert objection is not None
    assert (objection.reason, name in objection.words) == (Reason.CODE_NOT_ALLOWED, True)
    assert Policy(IMAGE).objection(references) is None


@pytest.mark.parametrize(
    "name",
    [
        "OMP_NUM_THREADS",
        "NCCL_DEBUG",
        "HTTPS_PROXY",
        "AWS_REGION",
        "A",
        "CUDA_VISIBLE_DEVICES",
        "FI_PROVIDER",
        "UCX_TLS",
    ],
)
def test_a_list_of_images_keeps_other_variables(name: str) -> None:
    session = make_session(pod={"env": [{"name": name, "value": "1"}]})
    assert Policy(IMAGE, allowed_images=()).objection(references_of(session)) is None


@pytest.mark.parametrize(
    "word",
    [
        *("--trust-remote-code", "--trust_remote_code", "--trust", "--middleware=x.Y", "--worker-extension-cls", "-O3"),
        *("--reasoning-parser-plugin", "--config=/models/x.yaml", "--load-format", "--max-num", "--seed\n--trust"),
    ],
)
def test_a_list_of_images_keeps_words_out_that_load_other_code(word: str) -> None:
    references = list(references_of(make_pool(**VLLM, serverArguments=[word])))
    objection = Policy(IMAGE, allowed_images=("ghcr.io/team/*",)).objection(references)
    assert objection is not None
    assert objection.reason == Reason.CODE_NOT_ALLOWED
    assert Policy(IMAGE).objection(references) is None


@pytest.mark.parametrize("words", [["--gpu-memory-utilization=0.85"], ["--max_num_seqs", "16", "--seed", "-1"]])
def test_a_list_of_images_keeps_flags_of_memory_and_batches(words: list[str]) -> None:
    policy = Policy(IMAGE, allowed_images=("ghcr.io/team/*",))
    assert policy.objection(references_of(make_pool(**VLLM, serverArguments=words))) is None


def test_the_charts_policy_has_the_same_words() -> None:
    template = (ROOT / "charts/tinsmith/templates/sessions/admissionpolicy.yaml").read_text()
    for words in (LOADER_VARIABLES, SERVER_ARGUMENTS):
        assert f'"{words}"' in template


def test_the_short_name_of_the_workers_own_image_is_that_image() -> None:
    assert Policy("docker.io/team/trainer:0.1.0", allowed_images=()).allows_image("team/trainer@sha256:ab")


@pytest.mark.parametrize(
    ("spec", "may"),
    [
        ({"source": token("hub-of-team")}, True),
        ({"source": token("keys")}, False),
        ({"pod": variable("keys")}, False),
        ({"pod": {"imagePullSecrets": [{"name": "keys"}]}}, False),
        ({"pod": variable("blue-ca")}, False),
        ({"pod": {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]}}, True),
    ],
)
def test_secrets_can_be_limited_to_a_list(spec: dict[str, Any], may: bool) -> None:
    policy = Policy(IMAGE, OWN, allowed_secrets=("hub-*", "blue-*"))
    assert (policy.objection(references_of(make_session(**spec))) is None) is may


def test_a_lone_star_vouches_for_no_image_and_a_list_does() -> None:
    """A lone star permits any image, and none of them is trusted."""
    assert Policy(IMAGE).vouches_for(IMAGE)
    assert not Policy(IMAGE).vouches_for("ghcr.io/team/trainer:1")
    assert Policy(IMAGE, allowed_images=("ghcr.io/team/*",)).vouches_for("ghcr.io/team/trainer:1")
