"""The certificate authority of an installation, and the leaf certificates that the authority signs.

The key of the authority exists only in its Secret and in this process. The certificate of a worker is valid only for
servers, and the certificate of the API server only for clients. The certificate of a pool's samplers is valid for
servers and clients, because samplers fetch saves from workers.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tinsmith_operator.api.base import Manifest, format_time
from tinsmith_operator.api.names import MANAGED_BY_LABEL
from tinsmith_operator.common.observed import CertificateFacts
from tinsmith_operator.errors import AuthorityInvalid, CertificateUnreadable

AUTHORITY_LIFETIME = timedelta(days=3650)
LEAF_LIFETIME = timedelta(days=30)
# A certificate begins earlier than now, because the clocks of nodes differ.
BACKDATED = timedelta(minutes=5)
# In bytes of PEM. A key of an elliptic curve has a few hundred bytes. The check of an RSA key of 8192 bits would block
# the operator for 4 s.
LONGEST_KEY = 1024
LONGEST_CERTIFICATE = 65536

API_SERVER_NAME = "api-server.tinsmith.internal"
OPERATOR_NAME = "operator.tinsmith.internal"

SecretData = dict[str, str]
"""The `data` of a Secret, in base64."""


class Use(Enum):
    SERVER = (ExtendedKeyUsageOID.SERVER_AUTH,)
    CLIENT = (ExtendedKeyUsageOID.CLIENT_AUTH,)
    BOTH = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclass(frozen=True)
class Leaf:
    """A leaf certificate, its key, and the certificates of the trusted authorities, in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes
    not_after: datetime

    def secret_data(self) -> SecretData:
        return encoded({"tls.crt": self.certificate, "tls.key": self.key, "ca.crt": self.authority})


@dataclass(frozen=True)
class Authority:
    """A certificate authority. `others` are further authorities that are trusted while a rotation is in progress."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    others: tuple[x509.Certificate, ...] = ()

    @property
    def fingerprint(self) -> str:
        """A fingerprint of all trusted authorities.

        A leaf certificate with the fingerprint of other authorities must be issued again.
        """
        return trust_fingerprint((self.certificate, *self.others))

    @property
    def pem(self) -> bytes:
        return certificate_pem(self.certificate)

    @property
    def bundle(self) -> bytes:
        """The certificates of all trusted authorities, for the `ca.crt` of each leaf certificate's Secret."""
        return b"".join(map(certificate_pem, (self.certificate, *self.others)))

    def secret_data(self) -> SecretData:
        return encoded({"tls.crt": self.pem, "tls.key": key_pem(self.key)})

    def check(self, now: datetime) -> None:
        """Raise AuthorityInvalid if the authority has expired."""
        end = self.certificate.not_valid_after_utc
        if now >= end:
            raise AuthorityInvalid(
                f"The certificate authority expired at {format_time(end)}. Put another one into its Secret; or delete "
                "the Secret, and the operator creates a new authority and new certificates for all workers."
            )

    def issue(self, dns_names: tuple[str, ...], use: Use, now: datetime) -> Leaf:
        """Issue a key and a certificate for the given names. The certificate does not outlive the authority.

        Raises AuthorityInvalid if the authority has expired.
        """
        self.check(now)
        key = ec.generate_private_key(ec.SECP256R1())
        not_after = min(now + LEAF_LIFETIME, self.certificate.not_valid_after_utc)
        certificate = (
            _draft(_name(dns_names[0]), self.certificate.subject, key.public_key(), now, not_after)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(use.value), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        pem = certificate_pem(certificate)
        return Leaf(pem, key_pem(key), self.bundle, certificate.not_valid_after_utc)


def new_authority(release: str, now: datetime) -> Authority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"{release} certificate authority")
    certificate = (
        _draft(name, name, key.public_key(), now, now + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Authority(certificate, key)


def read_authority(secret: Manifest, files: str = "tls") -> Authority:
    """Return the authority in a Secret.

    `files` are the names of the files without suffix. Raises AuthorityInvalid if the Secret does not hold a valid
    authority.
    """
    try:
        certificate, key = read_certificate(secret, f"{files}.crt"), _key(secret, f"{files}.key")
        if key.public_key() != certificate.public_key():
            raise ValueError("its key does not belong to its certificate")
        if not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca:
            raise ValueError("its certificate is not an authority's")
        _ = certificate.subject, certificate.not_valid_after_utc  # parsed only on access, and always needed
    except Exception as error:  # see _why_not
        raise AuthorityInvalid(
            f"The Secret {_place(secret)} holds no certificate authority ({_why_not(error)}). Restore a backup; or "
            "delete it, and the operator creates a new authority and new certificates for all workers."
        ) from error
    return Authority(certificate, key)


def read_facts(secret: Manifest) -> CertificateFacts | None:
    """Return the facts about the leaf certificate in a Secret, or None if `parse_facts` raises an exception."""
    try:
        return parse_facts(secret)
    except CertificateUnreadable:
        return None


def parse_facts(secret: Manifest) -> CertificateFacts:
    """Return the facts about the leaf certificate in a Secret. Raises CertificateUnreadable.

    `authority_fingerprint` is the fingerprint of `ca.crt`. The fingerprint is empty if the first certificate in
    `ca.crt` is not the issuer of the leaf certificate.
    """
    try:
        leaf, key = read_certificate(secret, "tls.crt"), _key(secret, "tls.key")
        trusted = x509.load_pem_x509_certificates(_decoded(secret, "ca.crt", LONGEST_CERTIFICATE))
        authority = trusted[0]
        if key.public_key() != leaf.public_key():
            raise ValueError("its key does not belong to its certificate")
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return CertificateFacts(
            not_before=leaf.not_valid_before_utc,
            not_after=leaf.not_valid_after_utc,
            dns_names=tuple(names.get_values_for_type(x509.DNSName)),
            authority_fingerprint=trust_fingerprint(trusted) if _signed(leaf, authority) else "",
            authority_not_after=authority.not_valid_after_utc,
        )
    except Exception as error:  # see _why_not
        raise CertificateUnreadable(
            f"The Secret {_place(secret)} holds no certificate of the operator ({_why_not(error)}). If it belongs to a "
            f"session or pool, it is issued again; otherwise remove its label {MANAGED_BY_LABEL}."
        ) from error


def read_certificate(secret: Manifest, name: str) -> x509.Certificate:
    """Return the certificate in one of a Secret's files.

    The parser of certificates can raise any exception (see `_why_not`).
    """
    return x509.load_pem_x509_certificate(_decoded(secret, name, LONGEST_CERTIFICATE))


def _key(secret: Manifest, name: str) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(_decoded(secret, name, LONGEST_KEY), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("its key is not one of an elliptic curve")
    return key


def _why_not(error: Exception) -> str:
    """Return the message of an exception that the parser of certificates raised.

    The parser raises ValueError or one of a dozen unrelated exceptions, for example for an unknown curve or a repeated
    extension.
    """
    return str(error) or type(error).__name__


def _place(secret: Manifest) -> str:
    return f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"


def fingerprint(certificate: x509.Certificate) -> str:
    return certificate.fingerprint(hashes.SHA256()).hex()


def trust_fingerprint(trusted: Sequence[x509.Certificate]) -> str:
    """Return a fingerprint for the authority that signs, and for the other trusted authorities."""
    return "+".join(map(fingerprint, trusted))


def _signed(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except Exception:  # the parser raises InvalidSignature, ValueError or TypeError
        return False
    return True


def _draft(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, not_after: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now.astimezone(UTC) - BACKDATED)
        .not_valid_after(not_after.astimezone(UTC))
    )


def _name(common_name: str) -> x509.Name:
    # X.520 limits a common name to 64 characters. Clients check the alternative names instead.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def encoded(data: Mapping[str, bytes]) -> SecretData:
    return {name: base64.b64encode(content).decode() for name, content in data.items()}


def _decoded(secret: Manifest, name: str, longest: int) -> bytes:
    """Return the decoded content of a file in a Secret. Raises ValueError."""
    text = (secret.get("data") or {}).get(name)
    if not text:
        raise ValueError(f"it has no {name}")
    try:
        content = base64.b64decode(text)
    except ValueError as error:
        raise ValueError(f"its {name} is not base64") from error
    if len(content) > longest:
        raise ValueError(f"its {name} is longer than {longest} bytes")
    return content
