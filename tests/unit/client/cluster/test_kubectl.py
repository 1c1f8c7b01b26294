"""The door to kubectl: what it is asked, and what its words mean."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith.cluster.errors import (
    ClusterUnreachable,
    Forbidden,
    KindUnknown,
    KubectlFailed,
    KubectlMissing,
    NotFound,
    PluginError,
)
from tinsmith.cluster.kubectl import Access, Kubectl, explain

SAID = {
    'error: the server doesn\'t have a resource type "trainingsessions"': (KindUnknown, "knows no trainingsessions"),
    'Error from server (Forbidden): pods is forbidden: User "ada" cannot list': (Forbidden, 'User "ada" cannot list'),
    'Error from server (NotFound): pods "x" not found': (NotFound, 'pods "x" not found'),
    "Error from server (Invalid): spec.suspend: must be boolean": (KubectlFailed, r"\(Invalid\): spec.suspend"),
    "The connection to the server localhost:8080 was refused - did you specify": (ClusterUnreachable, "--context"),
    "Unable to connect to the server: dial tcp: lookup nowhere: no such host": (ClusterUnreachable, "no such host"),
    "error: You must be logged in to the server (Unauthorized)": (ClusterUnreachable, "log in"),
    'error: context "nope" does not exist': (ClusterUnreachable, 'context "nope" does not exist'),
    "Error in configuration: context was not found for specified context: nope": (ClusterUnreachable, "--kubeconfig"),
    "error: something new": (KubectlFailed, "kubectl failed: something new."),
    "": (KubectlFailed, "it gave no reason"),
}


@pytest.mark.parametrize(("stderr", "meaning"), SAID.items())
def test_kubectls_words_become_one_sentence_with_a_cure(stderr: str, meaning: tuple[type[PluginError], str]) -> None:
    kind, sentence = meaning
    error = explain(stderr)
    assert type(error) is kind
    assert "\n" not in str(error)
    with pytest.raises(kind, match=sentence):
        raise error


def test_what_kubectls_library_logs_is_no_part_of_the_reason() -> None:
    logged = 'E1121 15:01:02.000001   12 memcache.go:265] "Unhandled Error" err="x"\n'
    assert str(explain(f"{logged}{logged}error: something new")) == "kubectl failed: something new."


def test_a_missing_kubectl_is_told() -> None:
    with pytest.raises(KubectlMissing, match="install kubectl"):
        Kubectl(program="/no/such/kubectl").find("pods")


@pytest.fixture
def echo(tmp_path: Path) -> str:
    """A kubectl that answers with the words it was given."""
    program = tmp_path / "kubectl"
    program.write_text(
        "#!/bin/sh\n"
        """printf '{"items": ["%s"' "$1"; shift; for word in "$@"; do printf ', "%s"' "$word"; done; echo ']}'\n"""
    )
    program.chmod(0o755)
    return str(program)


def test_the_users_choice_of_a_cluster_goes_to_every_call(echo: str) -> None:
    kubectl = Kubectl(Access(context="c", namespace="n", kubeconfig="f"), program=echo)
    words = ["--context=c", "--namespace=n", "--kubeconfig=f", "get", "pods", "--selector=a=b", "--output=json"]
    assert kubectl.find("pods", "a=b") == words
    assert kubectl.within("m").find("pods")[1] == "--namespace=m"


def test_all_namespaces_are_asked_for_where_lists_are_made(echo: str) -> None:
    assert "--all-namespaces" in Kubectl(program=echo, all_namespaces=True).find("pods")
    assert "--all-namespaces" in Kubectl(program=echo).everywhere().find("pods")
    assert "--all-namespaces" not in Kubectl(program=echo, all_namespaces=True).within("n").find("pods")


def test_a_patch_is_a_merge_of_that_object_alone(echo: str) -> None:
    words = Kubectl(program=echo).merge_patch("pods", "x", {})["items"]
    assert words == ["patch", "pods", "x", "--type=merge", "--patch={}", "--output=json"]
