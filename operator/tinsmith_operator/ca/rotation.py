"""How one certificate authority takes over from another without anybody noticing. Pure but for chance.

Three states, and the Secret of the authority says which: everybody must trust the next one before it issues anything,
and the one before is trusted until nothing that it issued is in use.

| State | In the Secret, beside `tls.crt` and `tls.key` | Leaves are issued by | and trust |
|---|---|---|---|
| at rest | | it | it |
| trusting | `next.crt`, `next.key` | it | it and the next |
| issuing | `previous.crt` | it, which was the next | it and the one before |

A state ends when every leaf is as it should be in it, and has been for so long that each process has read its files.
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
"""By an administrator, on the Secret of the authority: any word. Once for each, another authority takes over."""
ROTATED_ANNOTATION = f"{GROUP}/rotated"
"""Beside it: for which word that has begun."""

BEFORE_ITS_END = timedelta(days=90)
"""Or a third of its life: leaves must not end with it, and a rotation that does not go on must be noticed."""


class State(Enum):
    AT_REST = "at rest"
    TRUSTING = "trusting"
    ISSUING = "issuing"


@dataclass(frozen=True)
class Stored:
    """What the Secret holds. current: with whom its leaves trust beside it."""

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
    """Raises AuthorityInvalid."""
    current, held = read_authority(secret), secret.get("data") or {}
    if "next.crt" in held:
        following = read_authority(secret, "next")
        return Stored(replace(current, others=(following.certificate,)), following)
    if "previous.crt" not in held:
        return Stored(current)
    try:
        previous = read_certificate(secret, "previous.crt")
    except Exception as error:  # readers of certificates raise what they like
        raise AuthorityInvalid(
            f"The previous.crt in the Secret {secret['metadata']['name']} is no certificate: take it out, and the "
            "authority before this one is trusted no more."
        ) from error
    return Stored(replace(current, others=(previous,)), previous=previous)


def is_requested(secret: Manifest, current: Authority, now: datetime) -> bool:
    """By a word of an administrator, or by its end that comes near. Only of an authority that the operator keeps."""
    metadata = secret["metadata"]
    said = metadata.get("annotations") or {}
    if (metadata.get("labels") or {}).get(MANAGED_BY_LABEL) != MANAGER:
        return False
    word = said.get(ROTATE_ANNOTATION)
    return (word is not None and word != said.get(ROTATED_ANNOTATION)) or is_due(current, now)


def is_due(current: Authority, now: datetime) -> bool:
    begin, end = current.certificate.not_valid_before_utc, current.certificate.not_valid_after_utc
    return now >= end - min(BEFORE_ITS_END, (end - begin) / 3)


def begin_rotation(secret: Manifest, stored: Stored, following: Authority) -> Manifest:
    """A change of the Secret: from now on the next one is trusted."""
    word = (secret["metadata"].get("annotations") or {}).get(ROTATE_ANNOTATION)
    noted = {"metadata": {"annotations": {ROTATED_ANNOTATION: word}}} if word is not None else {}
    return {**noted, "data": replace(stored, following=following).data}


def continue_rotation(stored: Stored) -> Manifest:
    """A change of the Secret, to the state after this one."""
    if stored.following is None:
        return {"data": {"previous.crt": None}}
    after = Stored(stored.following, previous=stored.current.certificate)
    return {"data": {**after.data, "next.crt": None, "next.key": None}}


def outdated_leaves(trust: str, leaves: Iterable[tuple[str, str]]) -> list[str]:
    """Who has no leaf yet as it should be now. leaves: whose, and the fingerprint of whom it trusts."""
    return [name for name, known in leaves if known != trust]
