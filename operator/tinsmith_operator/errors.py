"""The errors of the operator. `kube/client.py` raises ClusterErrors for errors of the Kubernetes API."""

from __future__ import annotations


class OperatorError(Exception):
    """An error that stops the current task of the operator. The message says what to do."""


class ClusterError(OperatorError):
    """A failed request to the Kubernetes API."""


class NotFound(ClusterError):
    """The object does not exist."""


class AlreadyExists(ClusterError):
    """An object with this name already exists."""


class Conflict(ClusterError):
    """The UID or version of the live object differs from the UID or version in the request."""


class Refused(ClusterError):
    """A request that the API server refuses until something changes: status 400, 403, 422 and similar."""


class Unavailable(ClusterError):
    """The API server did not answer, or failed. The API server may have carried out the request.

    `retry_after_seconds` is the waiting time that the API server asks for.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Throttled(Unavailable):
    """A request that the API server rejects because too many requests arrive. The request was not carried out."""


class NotLeading(OperatorError):
    """A write of an operator that does not hold the Lease. Another operator may be leading."""


class SecretTaken(OperatorError):
    """A foreign Secret has a name that the installation needs."""


class AuthorityInvalid(OperatorError):
    """The Secret of the certificate authority does not hold a certificate with a matching key."""


class CertificateUnreadable(OperatorError):
    """A Secret of the operator does not hold a certificate, the key of the certificate, and the authority."""
