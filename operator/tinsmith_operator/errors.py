"""The errors of the operator. `kube/client.py` raises them for errors of the Kubernetes API."""

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
    """The object or its version is not the one in the request."""


class Refused(ClusterError):
    """A request that the API server will refuse until something changes: status 400, 403, 422 and similar."""


class Unavailable(ClusterError):
    """The API server did not answer, or failed. The request may have been carried out nevertheless.

    `retry_after_seconds` is the time for which the API server asks to wait.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Throttled(Unavailable):
    """A request that the API server rejects because there are too many requests. The request was not carried out."""


class NotLeading(OperatorError):
    """A write while this operator does not hold the Lease. Another operator may be leading."""


class SecretTaken(OperatorError):
    """A foreign Secret has a name that the installation needs."""


class AuthorityInvalid(OperatorError):
    """The Secret of the certificate authority does not hold a certificate and its key."""


class CertificateUnreadable(OperatorError):
    """A Secret of the operator does not hold a certificate, its key and its authority."""
