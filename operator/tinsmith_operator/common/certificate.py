"""Whether the certificate of a workload is missing, or due for renewal."""

from __future__ import annotations

from datetime import datetime, timedelta

from tinsmith_operator.api.names import worker_dns_name
from tinsmith_operator.build.network import build_certificate_secret
from tinsmith_operator.common.actions import IssueCertificate
from tinsmith_operator.common.drift import is_in_place
from tinsmith_operator.common.observed import CertificateFacts, Surroundings
from tinsmith_operator.common.ownership import belongs_to

RENEWAL = timedelta(days=10)
"""Before its end: a third of its life, in which somebody may notice that renewal fails."""


def ensure_certificate(
    observed: Surroundings, worker_id: str | None, now: datetime, *roles: str
) -> tuple[IssueCertificate, ...]:
    """worker_id: whom it must name, None when that is not known yet; roles: further names in it."""
    authority = observed.authority_fingerprint
    if worker_id is None or authority is None:
        return ()
    wanted = build_certificate_secret(observed.owner)
    names = (worker_dns_name(worker_id), *roles)
    live = observed.certificate_secret
    if live is None:
        return (IssueCertificate(wanted, names, uid=None, resource_version=None),)
    if not belongs_to(observed.owner, live) or (
        is_in_place(observed, live, wanted) and is_fresh(observed.certificate, names, authority, now)
    ):
        return ()
    metadata = live["metadata"]
    return (IssueCertificate(wanted, names, metadata["uid"], metadata["resourceVersion"]),)


def renewal_time(facts: CertificateFacts) -> datetime | None:
    """None for a leaf that ends with its authority: no renewal would make it last longer."""
    return facts.not_after - RENEWAL if facts.not_after < facts.authority_not_after else None


def is_fresh(
    facts: CertificateFacts | None, dns_names: tuple[str, ...], authority_fingerprint: str, now: datetime
) -> bool:
    """Whether a leaf can stay as it is. One from the future was issued by a clock that has been set back since."""
    if facts is None or (facts.dns_names, facts.authority_fingerprint) != (dns_names, authority_fingerprint):
        return False
    due = renewal_time(facts)
    return facts.not_before <= now and (due is None or now < due)


def certificate_is_foreign(observed: Surroundings) -> bool:
    """A pod would mount it, key and all. Which is said as a conflict of names; what runs already has its own."""
    live = observed.certificate_secret
    return live is not None and not belongs_to(observed.owner, live)
