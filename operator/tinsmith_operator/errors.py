"""The errors of the operator. `kube/client.py` raises them for errors of the Kubernetes API."""

from __future__ import annotations


class OperatorError(Exception):
    """An error that stops the present task of the operator. The message says what to do."""


class ClusterError(OperatorError):
    """A failed request to the Kubernetes API."""


class NotFound(ClusterError):
    """The object does not exist."""


class AlreadyExists(ClusterError):
    """An object of this name exists already."""


class Conflict(ClusterError):
    """The object, or its version, differs from what the request names."""


class Refused(ClusterError):
    """A request that the API server refuses until something changes: status 400, 403, 422 and similar."""


class Unavailable(ClusterError):
    """The API server did not answer, or failed. The request may have been carried out.

    retry_after_seconds: the time that the API server asked for.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Throttled(Unavailable):
    """The API server asks for fewer requests. The request was not carried out."""


class NotLeading(OperatorError):
    """A write without holding the Lease. Another operator may be the leader."""


class SecretTaken(OperatorError):
    """A foreign Secret has a name that the installation needs."""


class AuthorityInvalid(OperatorError):
    """The Secret of the certificate authority does not hold a certificate and its key."""


class CertificateUnreadable(OperatorError):
    """A Secret of the operator does not hold a certificate, its key and its authority."""
