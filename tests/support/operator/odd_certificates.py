"""Certificates that a reader trips over in other ways than by saying that they are none."""

from __future__ import annotations

import base64
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tinsmith_operator.ca.certificates import Authority, Leaf

NOW = datetime(2055, 3, 1, tzinfo=UTC)
"""The first day after which a certificate writes its years with four digits."""
NAMES = x509.SubjectAlternativeName([x509.DNSName("uid.worker.tinsmith.internal")])
AUTHORITY = x509.BasicConstraints(ca=True, path_length=None)


def odd_leaves() -> dict[str, Leaf]:
    """Return leaves by what is odd about each, with their keys where they have one."""
    key = ec.generate_private_key(ec.SECP256R1())
    whole, twice = _der(key, NAMES, AUTHORITY), _der(key, NAMES, AUTHORITY, _unknown("2.5.29.31", b"\x30\x00"))
    end = b"20550302000000Z"
    contents = {
        "empty-pem": b"-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n",
        "no-pem": b"nonsense",
        "no-utf-8": b"\xff\xfe" * 100,
        "huge": b"A" * 1_000_000,
        "no-such-version": _pem(whole.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05")),
        "no-such-curve": _pem(whole.replace(b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x2a\x86\x48\xce\x3d\x03\x01\x09")),
        "no-such-kind-of-key": _pem(whole.replace(b"\x2a\x86\x48\xce\x3d\x02\x01", b"\x2a\x86\x48\xce\x3d\x02\x09")),
        "twice-an-extension": _pem(twice.replace(b"\x55\x1d\x1f", b"\x55\x1d\x11")),
        "ends-in-the-year-0": _pem(whole.replace(end, b"00000302000000Z")),
        "ends-in-month-13": _pem(whole.replace(end, b"20551302000000Z")),
        "names-of-a-kind-that-is-gone": _pem(_der(key, _unknown("2.5.29.17", b"\x30\x04\xa3\x02\x05\x00"), AUTHORITY)),
        "names-that-are-no-text": _pem(_der(key, _unknown("2.5.29.17", b"\x30\x05\x82\x03\xff\xff\xff"), AUTHORITY)),
        "names-no-host": _pem(_der(key)),
    }
    pem = _key_pem(key)
    return {oddity: Leaf(content, pem, content, NOW) for oddity, content in contents.items()}


def authority_of_a_name_that_is_no_text() -> Authority:
    """Return an authority whose name is no text, which is read when the first leaf is made."""
    key = ec.generate_private_key(ec.SECP256R1())
    der = _der(key, AUTHORITY).replace(b"\x0c\x03odd", b"\x0c\x03od\xff")
    return Authority(x509.load_der_x509_certificate(der), key)


def _der(key: ec.EllipticCurvePrivateKey, *extensions: x509.ExtensionType) -> bytes:
    """Return a self-signed certificate with some bytes replaced.

    Its signature is wrong, which no reader gets as far as to see.
    """
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "odd")])
    draft = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    draft = draft.serial_number(5).not_valid_before(NOW).not_valid_after(NOW + timedelta(days=1))
    for extension in extensions:
        draft = draft.add_extension(extension, critical=False)
    return draft.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def _unknown(oid: str, value: bytes) -> x509.UnrecognizedExtension:
    return x509.UnrecognizedExtension(x509.ObjectIdentifier(oid), value)


def _pem(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    no_password = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, no_password)
