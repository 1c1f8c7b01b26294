"""The certificate of a workload.

A missing certificate is issued, and an existing certificate is renewed before it expires.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.build.network import build_certificate_secret
from tinsmith_operator.common.actions import IssueCertificate
from tinsmith_operator.common.drift import is_in_place
from tinsmith_operator.common.observed import CertificateFacts, Surroundings
from tinsmith_operator.common.ownership import belongs_to

RENEWAL = timedelta(days=10)
"""The time between the renewal and the expiry of a certificate: a third of its life, to leave time for repairs."""


def ensure_certificate(
    observed: Surroundings, worker_id: str | None, now: datetime, *roles: str
) -> tuple[IssueCertificate, ...]:
    """Issue a certificate if the present certificate is missing, has other names, or is due for renewal.

    `worker_id` is the ID that the certificate must contain, or None if the ID is not known yet. `roles` are further
        names in the certificate.
    """
    authority = observed.authority_fingerprint
    if worker_id is None or authority is None:
        return ()
    secret = build_certificate_secret(observed.owner)
    names = (worker_dns_name(worker_id), *roles)
    live = observed.certificate_secret
    if live is None:
        return (IssueCertificate(secret, names, uid=None, resource_version=None),)
    if not belongs_to(observed.owner, live) or (
        is_in_place(observed, live, secret) and is_fresh(observed.certificate, names, authority, now)
    ):
        return ()
    metadata = live["metadata"]
    return (IssueCertificate(secret, names, metadata["uid"], metadata["resourceVersion"]),)


def renewal_time(facts: CertificateFacts) -> datetime | None:
    """Return when to renew.

    Return None if the certificate expires with its authority, because a renewal could not extend it.
    """
    return facts.not_after - RENEWAL if facts.not_after < facts.authority_not_after else None


def is_fresh(
    facts: CertificateFacts | None, dns_names: tuple[str, ...], authority_fingerprint: str, now: datetime
) -> bool:
    """Return whether a certificate may stay in use.

    A certificate with a validity that begins in the future is not usable: the clock was set back after the certificate
    was issued.
    """
    if facts is None or (facts.dns_names, facts.authority_fingerprint) != (dns_names, authority_fingerprint):
        return False
    due = renewal_time(facts)
    return facts.not_before <= now and (due is None or now < due)


def certificate_is_foreign(observed: Surroundings) -> bool:
    """Return whether the Secret for the certificate belongs to another owner.

    A new pod would mount the other owner's Secret, and would get the other owner's key. A running pod already has its
    own certificate.
    """
    live = observed.certificate_secret
    return live is not None and not belongs_to(observed.owner, live)
