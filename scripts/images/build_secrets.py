"""What a build needs to know of this machine's network, and no image may hold."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

CERTIFICATES_IN_BUILD = "/run/secrets/ca-certificates"
_CERTIFICATE_VARIABLES = ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy")
_DEBIANS_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@contextmanager
def build_secrets(environment: Mapping[str, str] = os.environ) -> Iterator[dict[str, Path]]:
    """The files of the secrets that the Dockerfiles mount, by name, for as long as the block runs."""
    with TemporaryDirectory(prefix="tinsmith-build-") as directory:
        file = Path(directory) / "build-environment"
        file.touch(mode=0o600)
        secrets = {"build-environment": file}
        variables = passed_variables(environment)
        certificates = _certificates(environment)
        if certificates is not None:
            secrets["ca-certificates"] = certificates
            variables |= dict.fromkeys(_CERTIFICATE_VARIABLES, CERTIFICATES_IN_BUILD)
        file.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items())))
        yield secrets


def passed_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Proxies, and pip's settings except the paths among them, which mean nothing inside a build."""
    return {
        name: value
        for name, value in environment.items()
        if name.lower() in _PROXY_VARIABLES or (name.startswith("PIP_") and not value.startswith(("/", "~", ".")))
    }


def _certificates(environment: Mapping[str, str]) -> Path | None:
    named = (Path(environment[name]) for name in _CERTIFICATE_VARIABLES if environment.get(name))
    return next((file for file in (*named, _DEBIANS_CERTIFICATES) if file.is_file()), None)
