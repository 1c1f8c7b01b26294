from __future__ import annotations

import base64
import ssl
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from support.operator.odd_certificates import authority_of_a_name_that_is_no_text, odd_leaves
from tinsmith_operator.ca.certificates import (
    LEAF_LIFETIME,
    Authority,
    Leaf,
    Use,
    new_authority,
    parse_facts,
    read_authority,
    read_facts,
)
from tinsmith_operator.common.certificate import is_fresh
from tinsmith_operator.errors import AuthorityInvalid, CertificateUnreadable

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
NAMES = ("uid.worker.tinsmith.internal",)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority("tinsmith", NOW)


@pytest.fixture(scope="module")
def leaf(authority: Authority) -> Leaf:
    return authority.issue(NAMES, Use.SERVER, NOW)


def secret(data: dict[str, str]) -> dict[str, Any]:
    return {"metadata": {"namespace": "tin", "name": "some"}, "data": data}


def encoded(content: bytes) -> str:
    return base64.b64encode(content).decode()


def test_an_authority_comes_back_from_its_secret(authority: Authority) -> None:
    again = read_authority(secret(authority.secret_data()))
    assert again.fingerprint == authority.fingerprint
    again.issue(NAMES, Use.SERVER, NOW)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"tls.crt": encoded(b"nonsense"), "tls.key": encoded(b"nonsense")},
        {"tls.crt": "not base64!", "tls.key": "?"},
    ],
    ids=["empty", "no certificate", "no base64"],
)
def test_a_secret_that_holds_no_authority_is_named_with_the_cure(data: dict[str, str]) -> None:
    with pytest.raises(AuthorityInvalid, match=r"Secret tin/some .*backup"):
        read_authority(secret(data))


def test_a_key_of_another_authority_is_noticed(authority: Authority) -> None:
    other = new_authority("tinsmith", NOW)
    data = {**authority.secret_data(), "tls.key": other.secret_data()["tls.key"]}
    with pytest.raises(AuthorityInvalid, match="does not belong"):
        read_authority(secret(data))


@pytest.mark.parametrize(
    ("use", "allowed"),
    [
        (Use.SERVER, [ExtendedKeyUsageOID.SERVER_AUTH]),
        (Use.CLIENT, [ExtendedKeyUsageOID.CLIENT_AUTH]),
        (Use.BOTH, [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
    ],
    ids=["server", "client", "both"],
)
def test_a_leaf_has_its_use_and_thirty_days(
    authority: Authority, use: Use, allowed: list[x509.ObjectIdentifier]
) -> None:
    certificate = x509.load_pem_x509_certificate(authority.issue(NAMES, use, NOW).certificate)
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == allowed
    assert certificate.not_valid_after_utc == NOW + LEAF_LIFETIME
    assert certificate.not_valid_before_utc < NOW, "clocks of nodes differ"
    certificate.verify_directly_issued_by(authority.certificate)


def test_a_leaf_does_not_outlive_its_authority(authority: Authority) -> None:
    end = authority.certificate.not_valid_after_utc
    assert authority.issue(NAMES, Use.SERVER, end - timedelta(days=3)).not_after == end


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_there_are_no_facts_about_an_incomplete_secret(leaf: Leaf, missing: str) -> None:
    data = {name: text for name, text in leaf.secret_data().items() if name != missing}
    assert read_facts(secret(data)) is None


def test_there_are_no_facts_about_a_leaf_with_another_ones_key(authority: Authority, leaf: Leaf) -> None:
    other = authority.issue(NAMES, Use.SERVER, NOW)
    assert read_facts(secret({**leaf.secret_data(), "tls.key": encoded(other.key)})) is None


@pytest.mark.parametrize("oddity", odd_leaves())
def test_an_odd_certificate_is_no_leaf_and_no_authority(oddity: str) -> None:
    """For some of these a parser raises exceptions of its own, other than ValueError."""
    data = odd_leaves()[oddity].secret_data()
    assert read_facts(secret(data)) is None
    with pytest.raises(AuthorityInvalid, match=r"Secret tin/some holds no certificate authority \(.+\)"):
        read_authority(secret(data))


@pytest.mark.parametrize("text", [None, 5, "", "!", "\N{SNOWMAN}"], ids=str)
@pytest.mark.parametrize("name", ["tls.crt", "tls.key", "ca.crt"])
def test_invalid_base64_is_not_a_certificate(leaf: Leaf, name: str, text: object) -> None:
    with pytest.raises(CertificateUnreadable, match="Secret tin/some holds no certificate"):
        parse_facts({**secret({}), "data": {**leaf.secret_data(), name: text}})


def test_a_key_that_would_take_seconds_to_check_is_not_read(leaf: Leaf) -> None:
    """The key is an RSA key, which nothing here uses; checking it would delay the renewal of the Lease."""
    long = b"-----BEGIN PRIVATE KEY-----\n" + b"A" * 6000 + b"\n-----END PRIVATE KEY-----\n"
    with pytest.raises(CertificateUnreadable, match=r"tls.key is longer than 1024 bytes"):
        parse_facts(secret({**leaf.secret_data(), "tls.key": encoded(long)}))


def test_an_authority_with_a_name_that_no_leaf_could_bear_is_not_taken() -> None:
    with pytest.raises(AuthorityInvalid, match="tin/some"):
        read_authority(secret(authority_of_a_name_that_is_no_text().secret_data()))


@pytest.mark.parametrize(
    ("days", "fresh"), [(0, True), (19, True), (20, False), (31, False)], ids=["new", "19 days", "20 days", "expired"]
)
def test_a_leaf_is_renewed_when_ten_days_are_left(authority: Authority, leaf: Leaf, days: int, fresh: bool) -> None:
    facts = read_facts(secret(leaf.secret_data()))
    assert is_fresh(facts, NAMES, authority.fingerprint, NOW + timedelta(days=days)) is fresh


def test_a_leaf_for_other_names_or_of_another_authority_is_not_fresh(authority: Authority, leaf: Leaf) -> None:
    facts = read_facts(secret(leaf.secret_data()))
    assert not is_fresh(facts, ("other",), authority.fingerprint, NOW)
    assert not is_fresh(facts, NAMES, "other", NOW)
    assert not is_fresh(None, NAMES, authority.fingerprint, NOW)


def test_a_leaf_that_ends_with_its_authority_is_not_renewed_over_and_over(authority: Authority) -> None:
    """No other would last longer, and each new one would be due at once."""
    now = authority.certificate.not_valid_after_utc - timedelta(days=5)
    facts = read_facts(secret(authority.issue(NAMES, Use.SERVER, now).secret_data()))
    assert is_fresh(facts, NAMES, authority.fingerprint, now)


def test_a_leaf_of_a_clock_that_was_set_back_since_is_not_fresh(authority: Authority) -> None:
    facts = read_facts(secret(authority.issue(NAMES, Use.SERVER, NOW + timedelta(days=2)).secret_data()))
    assert not is_fresh(facts, NAMES, authority.fingerprint, NOW)


def test_an_authority_that_has_ended_issues_nothing_and_says_so(authority: Authority) -> None:
    with pytest.raises(AuthorityInvalid, match=r"expired at 20.*Put another one"):
        authority.issue(NAMES, Use.SERVER, authority.certificate.not_valid_after_utc)


def test_openssl_accepts_the_chain_for_its_name_and_for_no_other() -> None:
    """The strictest reader at hand: Python's ssl with every check on."""
    authority = new_authority("tinsmith", datetime.now(UTC))
    leaf = authority.issue(NAMES, Use.SERVER, datetime.now(UTC))
    client = ssl.create_default_context(cadata=authority.pem.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    assert handshake(client, leaf, NAMES[0]) is None
    assert "Hostname mismatch" in str(handshake(client, leaf, "other.worker.tinsmith.internal"))


def handshake(client: ssl.SSLContext, leaf: Leaf, name: str) -> Exception | None:
    """Return the client's error of a handshake in memory; None when there is none."""
    import tempfile

    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as chain:
        chain.write(leaf.certificate + leaf.key)
        chain.flush()
        server.load_cert_chain(chain.name)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=name)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(6):
        for end in (here, there):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                return error
    return None
