from __future__ import annotations

import subprocess
from pathlib import Path

from images.archives import CERTIFICATES_IN_BUILD, build_secrets, passed_variables


def test_proxies_and_pips_settings_are_passed_to_a_build() -> None:
    environment = {"https_proxy": "http://proxy:3128", "NO_PROXY": "local", "PIP_DEFAULT_TIMEOUT": "60"}
    assert passed_variables({**environment, "PATH": "/bin", "HF_TOKEN": "secret"}) == environment


def test_paths_of_this_machine_are_not_passed_since_a_build_has_others() -> None:
    assert passed_variables({"PIP_FIND_LINKS": "/wheels", "PIP_CACHE_DIR": "~/cache", "PIP_NO_INPUT": "1"}) == {
        "PIP_NO_INPUT": "1"
    }


def test_a_shell_reads_the_values_back_as_they_are() -> None:
    value = 'http://user:it\'s $HOME "quoted"@proxy'
    with build_secrets({"https_proxy": value}) as secrets:
        command = f'. {secrets["build-environment"]}; printf %s "$https_proxy"'
        assert subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout == value


def test_a_private_authority_is_passed_as_a_file_to_every_tool(tmp_path: Path) -> None:
    authority = tmp_path / "authority.crt"
    authority.write_text("certificate")
    with build_secrets({"SSL_CERT_FILE": str(authority)}) as secrets:
        assert secrets["ca-certificates"] == authority
        text = secrets["build-environment"].read_text()
    for variable in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"):
        assert f"export {variable}={CERTIFICATES_IN_BUILD}\n" in text


def test_the_secrets_are_readable_by_their_owner_alone_and_gone_after_the_build() -> None:
    with build_secrets({"https_proxy": "http://user:word@proxy"}) as secrets:
        file = secrets["build-environment"]
        assert file.stat().st_mode & 0o077 == 0
    assert not file.exists()
