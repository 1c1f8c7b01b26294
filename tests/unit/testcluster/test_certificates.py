"""The certificates of a cluster stand on one authority and say who their holder is."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import NameOID
from kubernetes.client import Configuration
from kubernetes.config import load_kube_config
from testcluster.kubernetes.certificates import create_authority, create_signing_key


def test_a_certificate_is_signed_by_its_authority_and_names_user_groups_and_hosts(tmp_path: Path) -> None:
    authority = create_authority(tmp_path / "certificates")
    pair = authority.issue("kubelet", "system:node:node-1", groups=("system:nodes",), hosts=("node-1", "10.0.0.1"))
    certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    certificate.verify_directly_issued_by(authority.certificate)
    subject = certificate.subject
    assert [name.value for name in subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["system:node:node-1"]
    assert [name.value for name in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)] == ["system:nodes"]
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node-1"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]


def test_keys_are_readable_by_their_owner_alone(tmp_path: Path) -> None:
    authority = create_authority(tmp_path)
    pair = authority.issue("admin", "admin")
    kubeconfig = authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", pair)
    signing_key = create_signing_key(tmp_path / "signing.key")
    for file in (pair.key, kubeconfig, signing_key, tmp_path / "ca.key"):
        assert file.stat().st_mode & 0o077 == 0


def test_a_kubeconfig_names_all_that_a_client_needs_wherever_it_runs(tmp_path: Path) -> None:
    authority = create_authority(tmp_path)
    pair = authority.issue("admin", "admin")
    document = json.loads(authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", pair).read_text())
    assert document["current-context"] == document["contexts"][0]["name"]
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    assert cluster == {"server": "https://10.0.0.1:6443", "certificate-authority": str(tmp_path / "ca.crt")}
    assert user == {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}


def test_a_client_that_reads_a_kubeconfig_leaves_no_copies_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is killed would, since it removes them at its end."""
    authority = create_authority(tmp_path / "certificates")
    kubeconfig = authority.kubeconfig(tmp_path / "kubeconfig", "https://10.0.0.1:6443", authority.issue("a", "a"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    load_kube_config(str(kubeconfig), client_configuration=Configuration())  # type: ignore[no-untyped-call]
    assert list(temporary.iterdir()) == []
