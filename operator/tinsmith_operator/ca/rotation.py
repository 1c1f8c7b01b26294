"""The rotation of the certificate authority, without interruption.

The Secret of the authority records the state. All processes must trust the next authority before it issues
certificates. The previous authority is trusted until all its certificates have been replaced.

| State | In the Secret, in addition to `tls.crt` and `tls.key` | Issuer of leaves | Authorities that leaves trust |
|---|---|---|---|
| at rest | | the authority | the authority |
| trusting | `next.crt`, `next.key` | the authority | the authority and the next authority |
| issuing | `previous.crt` | the new authority | the new authority and the previous authority |

A state ends when all leaf certificates are up to date and each process has had time to read its files again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum

from cryptography import x509

from tinsmith_operator.api.base import Manifest
from tinsmith_operator.api.names import GROUP, MANAGED_BY_LABEL, MANAGER
from tinsmith_operator.ca.certificates import (
    Authority,
    SecretData,
    certificate_pem,
    encoded,
    key_pem,
    read_authority,
    read_certificate,
)
from tinsmith_operator.errors import AuthorityInvalid

ROTATE_ANNOTATION = f"{GROUP}/rotate"
"""An annotation that an administrator sets on the Secret of the authority. The value of the annotation may be any word.

For each new word in the annotation, the authority is rotated once.
"""
ROTATED_ANNOTATION = f"{GROUP}/rotated"
"""An annotation on the Secret of the authority: the word for which the authority was last rotated."""

BEFORE_ITS_END = timedelta(days=90)
"""The time between a rotation and the expiry of the old authority.

For an authority with a short life, the time is a third of its life.

The time is long, so that leaf certificates do not expire with the authority and administrators have time for repairs.
"""


class State(Enum):
    AT_REST = "at rest"
    TRUSTING = "trusting"
    ISSUING = "issuing"


@dataclass(frozen=True)
class Stored:
    """The content of the Secret.

    `current` is the authority that signs; `current.others` are the other trusted authorities.
    """

    current: Authority
    following: Authority | None = None
    previous: x509.Certificate | None = None

    @property
    def state(self) -> State:
        if self.following is not None:
            return State.TRUSTING
        return State.ISSUING if self.previous is not None else State.AT_REST

    @property
    def data(self) -> SecretData:
        data = self.current.secret_data()
        if self.following is not None:
            data |= encoded({"next.crt": self.following.pem, "next.key": key_pem(self.following.key)})
        if self.previous is not None:
            data |= encoded({"previous.crt": certificate_pem(self.previous)})
        return data


def read_stored(secret: Manifest) -> Stored:
    """Return the parsed content of the Secret.

    Raises AuthorityInvalid if the Secret does not hold a valid authority.
    """
    current, held = read_authority(secret), secret.get("data") or {}
    if "next.crt" in held:
        following = read_authority(secret, "next")
        return Stored(replace(current, others=(following.certificate,)), following)
    if "previous.crt" not in held:
        return Stored(current)
    try:
        previous = read_certificate(secret, "previous.crt")
    except Exception as error:  # the parser of certificates can raise any exception
        raise AuthorityInvalid(
            f"The previous.crt in the Secret {secret['metadata']['name']} is not a certificate. Remove it: the "
            "previous authority is then no longer trusted."
        ) from error
    return Stored(replace(current, others=(previous,)), previous=previous)


def is_requested(secret: Manifest, current: Authority, now: datetime) -> bool:
    """Return whether to rotate: an administrator requests a rotation, or the operator's own authority expires soon."""
    metadata = secret["metadata"]
    annotations = metadata.get("annotations") or {}
    if (metadata.get("labels") or {}).get(MANAGED_BY_LABEL) != MANAGER:
        return False
    word = annotations.get(ROTATE_ANNOTATION)
    return (word is not None and word != annotations.get(ROTATED_ANNOTATION)) or is_due(current, now)


def is_due(current: Authority, now: datetime) -> bool:
    begin, end = current.certificate.not_valid_before_utc, current.certificate.not_valid_after_utc
    return now >= end - min(BEFORE_ITS_END, (end - begin) / 3)


def begin_rotation(secret: Manifest, stored: Stored, following: Authority) -> Manifest:
    """Return the patch of the Secret that makes all processes trust the next authority."""
    word = (secret["metadata"].get("annotations") or {}).get(ROTATE_ANNOTATION)
    noted = {"metadata": {"annotations": {ROTATED_ANNOTATION: word}}} if word is not None else {}
    return {**noted, "data": replace(stored, following=following).data}


def continue_rotation(stored: Stored) -> Manifest:
    """Return the patch that moves the Secret to the next state."""
    if stored.following is None:
        return {"data": {"previous.crt": None}}
    after = Stored(stored.following, previous=stored.current.certificate)
    return {"data": {**after.data, "next.crt": None, "next.key": None}}


def outdated_leaves(trust: str, leaves: Iterable[tuple[str, str]]) -> list[str]:
    """Return the owners whose leaf certificates are outdated.

    `leaves` contains each owner, with the fingerprint that this owner trusts.
    """
    return [name for name, known in leaves if known != trust]
