"""Certificates made on the spot, and folders of them as the kubelet mounts a Secret."""

from __future__ import annotations

import datetime
import itertools
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVER, CLIENT = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
MONTH = datetime.timedelta(days=30)

_moments = itertools.count()


@dataclass(frozen=True, slots=True)
class Leaf:
    """PEM contents."""

    certificate: bytes
    key: bytes


class Authority:
    """A certificate authority of its own; two of them share nothing but their name."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tinsmith")])
        certificate = (
            _builder(self._key, self._name, issuer=self._name, lifetime=10 * MONTH)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = _pem(certificate)

    def leaf(
        self, *names: str, usages: tuple[x509.ObjectIdentifier, ...], lifetime: datetime.timedelta = MONTH
    ) -> Leaf:
        """Return a certificate for these DNS names. A negative lifetime makes one that has expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            _builder(key, x509.Name([]), issuer=self._name, lifetime=lifetime)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        content = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Leaf(_pem(certificate), content)


def mount_secret(directory: Path, leaf: Leaf, authority: Authority) -> Path:
    """Write tls.crt, tls.key and ca.crt into a folder, or replace them there, in one step."""
    files = {"tls.crt": leaf.certificate, "tls.key": leaf.key, "ca.crt": authority.certificate}
    moment = f"..moment-{next(_moments)}"
    (directory / moment).mkdir(parents=True)
    for name, content in files.items():
        (directory / moment / name).write_bytes(content)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    fresh = directory / "..data_tmp"
    fresh.symlink_to(moment)
    fresh.replace(directory / "..data")
    return directory


def _builder(
    key: ec.EllipticCurvePrivateKey, subject: x509.Name, *, issuer: x509.Name, lifetime: datetime.timedelta
) -> x509.CertificateBuilder:
    end = datetime.datetime.now(datetime.UTC) + lifetime
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(end - max(2 * lifetime, MONTH))
        .not_valid_after(end)
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
