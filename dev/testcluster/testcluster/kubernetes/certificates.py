"""The certificate authority of a cluster, and the certificates and kubeconfig files from this authority."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = timedelta(days=365)
_USAGES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]

_SIGNS_CERTIFICATES = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Pair:
    """The files of a certificate and of the certificate's key."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """The certificate authority of the cluster. The files of the authority are in `directory`."""

    directory: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def file(self) -> Path:
        return self.directory / "ca.crt"

    def issue(
        self, file_name: str, common_name: str, *, groups: tuple[str, ...] = (), hosts: tuple[str, ...] = ()
    ) -> Pair:
        """Issue a certificate for servers and clients.

        Kubernetes reads the user and the groups from the subject of the certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _certificate(_subject(common_name, groups), self.certificate.subject, key)
        builder = builder.add_extension(x509.ExtendedKeyUsage(_USAGES), critical=False)
        # Python 3.13 refuses a server certificate that does not identify its signing key.
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        return _write(self.directory / file_name, key, builder.sign(self.key, hashes.SHA256()))

    def kubeconfig(self, file: Path, server: str, pair: Pair) -> Path:
        """Write a kubeconfig with the paths of the certificates and the key."""
        cluster = {"server": server, "certificate-authority": str(self.file.absolute())}
        user = {"client-certificate": str(pair.certificate.absolute()), "client-key": str(pair.key.absolute())}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tinsmith-test", "cluster": cluster}],
            "users": [{"name": "tinsmith-test", "user": user}],
            "contexts": [{"name": "tinsmith-test", "context": {"cluster": "tinsmith-test", "user": "tinsmith-test"}}],
            "current-context": "tinsmith-test",
        }
        file.touch(mode=0o600)
        file.write_text(json.dumps(document, indent=2) + "\n")
        return file


def create_authority(directory: Path) -> Authority:
    directory.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("tinsmith-test", ())
    builder = _certificate(subject, subject, key)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
    certificate = builder.sign(key, hashes.SHA256())
    _write(directory / "ca", key, certificate)
    return Authority(directory, certificate, key)


def create_signing_key(file: Path) -> Path:
    """Create the key that signs and verifies service-account tokens."""
    _write_key(file, ec.generate_private_key(ec.SECP256R1()))
    return file


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # The certificate begins a minute earlier, because clocks inside virtual machines may jump.
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + _LIFETIME)
    )


def _subject(common_name: str, groups: tuple[str, ...]) -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
    return x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(stem: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> Pair:
    pair = Pair(stem.with_name(f"{stem.name}.crt"), stem.with_name(f"{stem.name}.key"))
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(pair.key, key)
    return pair


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    file.touch(mode=0o600)
    file.write_bytes(encoded)
