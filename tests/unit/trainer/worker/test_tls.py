from __future__ import annotations

from pathlib import Path

import pytest
from support.certificates import SERVER, Authority, Leaf, mount_secret
from tinsmith_trainer.errors import TlsInvalid
from tinsmith_trainer.worker.tls import read_tls_files


@pytest.fixture
def authority() -> Authority:
    return Authority()


def test_files_are_those_of_the_latest_swap(tmp_path: Path, authority: Authority) -> None:
    leaves = [authority.leaf("a", usages=(SERVER,)) for _ in range(2)]
    for leaf in leaves:
        mount_secret(tmp_path, leaf, authority)
        files = read_tls_files(tmp_path)
        assert (files.certificate, files.key, files.authority) == (leaf.certificate, leaf.key, authority.certificate)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path, authority: Authority) -> None:
    leaf, other = (authority.leaf("a", usages=(SERVER,)) for _ in range(2))
    mount_secret(tmp_path, Leaf(leaf.certificate, other.key), authority)
    with pytest.raises(TlsInvalid, match="key values mismatch"):
        read_tls_files(tmp_path)


@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_a_missing_file_is_refused_with_the_required_files(tmp_path: Path, authority: Authority, name: str) -> None:
    mount_secret(tmp_path, authority.leaf("a", usages=(SERVER,)), authority)
    (tmp_path / name).resolve().unlink()
    with pytest.raises(TlsInvalid, match=r"must hold tls\.crt, its tls\.key, and ca\.crt"):
        read_tls_files(tmp_path)
