"""Calls of kubectl, and the errors that its output means."""

from __future__ import annotations

import pytest
from tinsmith.cluster.kubectl import (
    ClusterUnreachable,
    Forbidden,
    KindUnknown,
    Kubectl,
    KubectlFailed,
    KubectlMissing,
    NotFound,
    PluginError,
    error_from,
)

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
    error = error_from(stderr)
    assert type(error) is kind
    assert "\n" not in str(error)
    with pytest.raises(kind, match=sentence):
        raise error


def test_log_lines_of_the_kubectl_library_are_not_in_the_reason() -> None:
    logged = 'E1121 15:01:02.000001   12 memcache.go:265] "Unhandled Error" err="x"\n'
    assert str(error_from(f"{logged}{logged}error: something new")) == "kubectl failed: something new."


def test_a_missing_kubectl_is_reported() -> None:
    with pytest.raises(KubectlMissing, match="install kubectl"):
        Kubectl(program="/no/such/kubectl").find("pods")
