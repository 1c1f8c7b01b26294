from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError
from tinsmith_operator.settings import Settings, unknown_variables

LEAST = {
    "namespace": "tin",
    "trainer_image": "registry.example/trainer:1",
    "checkpoint_root": "s3://bucket/checkpoints",
}


def make(**changes: object) -> Settings:
    return Settings.model_validate({**LEAST, **changes})


def test_names_follow_from_the_release_unless_they_are_given() -> None:
    settings = make(release="blue")
    assert settings.lease == "blue-operator"
    assert settings.ca_secret_name == "blue-ca"
    assert settings.api_server_tls_secret_name == "blue-api-server-tls"
    given = make(lease_name="l", ca_secret="c", api_server_tls_secret="a")
    assert (given.lease, given.ca_secret_name, given.api_server_tls_secret_name) == ("l", "c", "a")


@pytest.mark.parametrize(
    ("text", "namespaces"),
    [
        ("", ("tin",)),
        ("a", ("a",)),
        ("a,b", ("a", "b")),
        (" b , a,,b ", ("b", "a")),
        ("tin,a", ("tin", "a")),
        ("*", None),
        (" * ", None),
    ],
)
def test_the_operator_watches_its_own_namespace_by_default(text: str, namespaces: tuple[str, ...]) -> None:
    assert make(watch_namespaces=text).scope.namespaces == namespaces


@pytest.mark.parametrize("text", ["a,*", "Research", "a b", "-a", "team-*", "a" * 64])
def test_an_invalid_namespace_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(ValidationError, match=r"is not the name of a namespace: separate names by commas.*`\*` alone"):
        make(watch_namespaces=text)


def test_an_environment_is_read_from_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LEAST.items():
        monkeypatch.setenv(f"TINSMITH_OPERATOR_{name.upper()}", value)
    monkeypatch.setenv("TINSMITH_OPERATOR_CHECKPOINT_ENVIRONMENT", '{"AWS_REGION": "eu-north-1"}')
    monkeypatch.setenv("TINSMITH_OPERATOR_CHECKPOINT_SECRET", "store")
    installation = Settings().installation()
    assert dict(installation.checkpoint_environment) == {"AWS_REGION": "eu-north-1"}
    assert installation.checkpoint_secret == "store"


@pytest.mark.parametrize("name", ["HOME", "HF_HOME", "HF_TOKEN", "OMP_NUM_THREADS", "A-B", "", "1A", "A=B"])
def test_a_variable_that_is_the_operators_or_none_at_all_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="cannot be set for workers"):
        make(checkpoint_environment={name: "x"})


@pytest.mark.parametrize("endpoint", ["minio:9000", "ftp://store", "https://", "https://store:port"])
def test_an_unreachable_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError):
        make(checkpoint_environment={"AWS_ENDPOINT_URL_S3": endpoint})


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://"])
def test_a_collector_that_is_no_url_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(ValidationError, match=r"is not the URL of an OTLP collector: use one such as http://"):
        make(tracing_endpoint=endpoint)


def test_a_root_in_the_workers_pods_needs_the_claim_that_holds_it() -> None:
    with pytest.raises(ValidationError, match="checkpoint_claim"):
        make(checkpoint_root="file:///var/lib/tinsmith/checkpoints")
    make(checkpoint_root="file:///var/lib/tinsmith/checkpoints", checkpoint_claim="checkpoints")


def test_a_variable_that_sets_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINSMITH_OPERATOR_NAMESPACE", "tin")
    monkeypatch.setenv("TINSMITH_OPERATOR_NAMESAPCE", "tin")
    assert unknown_variables() == ["TINSMITH_OPERATOR_NAMESAPCE"]


def test_the_program_names_the_missing_requirement_and_exits() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tinsmith_operator"],
        env={"TINSMITH_OPERATOR_NAMESPACE": "tin", "TINSMITH_OPERATOR_BURST": "none"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "TINSMITH_OPERATOR_TRAINER_IMAGE: Field required" in ended.stderr
    assert "TINSMITH_OPERATOR_BURST: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("lease", "renew"), [(15, 5.1), (3, 2)])
def test_a_lease_that_would_be_renewed_too_late_is_refused(lease: int, renew: float) -> None:
    with pytest.raises(ValidationError, match="at most a third of it"):
        make(lease_seconds=lease, lease_renew_seconds=renew)
    assert make(lease_seconds=15, lease_renew_seconds=5).lease_renew_seconds == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"restart_budget": "0"}, "not a budget of restarts"),
        ({"restart_window": "nights"}, "not a window for restarts"),
    ],
)
def test_restarts_that_cannot_be_paced_are_refused(changes: dict[str, str], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        make(**changes)


def test_automatic_restarts_are_off_by_default() -> None:
    assert not make().restart_policy.automatic
    assert make(restart_automatically=True, restart_budget="20%").restart_policy.most(30) == 6
