"""The certificates of a cluster stand on one authority and say who their holder is."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config
from testcluster.kubernetes.certificates import create_authority, create_signing_key


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    authority = create_authority(tmp_path)
    pair = authority.issue("admin", "admin")
    kubeconfig = authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", pair)
    signing_key = create_signing_key(tmp_path / "signing.key")
    for file in (pair.key, kubeconfig, signing_key, tmp_path / "ca.key"):
        assert file.stat().st_mode & 0o077 == 0


def test_a_client_that_reads_a_kubeconfig_leaves_no_copies_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed client would leave them, since it removes them at its end."""
    authority = create_authority(tmp_path / "certificates")
    kubeconfig = authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", authority.issue("a", "a"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    load_kube_config(str(kubeconfig), client_configuration=Configuration())  # type: ignore[no-untyped-call]
    assert list(temporary.iterdir()) == []
