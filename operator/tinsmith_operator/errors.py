"""What can go wrong for the operator. `kube/client.py` turns the Kubernetes client's errors into these."""

from __future__ import annotations


class OperatorError(Exception):
    """Anything that stops what the operator was doing; the message says what to do."""


class ClusterError(OperatorError):
    """A request to the Kubernetes API did not do what was asked."""


class NotFound(ClusterError):
    """The object is not there."""


class AlreadyExists(ClusterError):
    """An object of this name is there already, whosever it is."""


class Conflict(ClusterError):
    """The object is another one, or another version of it, than the request was meant for."""


class Refused(ClusterError):
    """The API server will not do this, now or later, until somebody changes something: 400, 403, 422 and the like."""


class Unavailable(ClusterError):
    """The API server could not be asked, or failed. What was asked may have been done or not.

    retry_after_seconds: when it said so.
    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Throttled(Unavailable):
    """The API server asks for less. Nothing was done."""


class NotLeading(OperatorError):
    """Another operator may be at work, so this one must not write."""


class SecretTaken(OperatorError):
    """A Secret of the installation's has a name that somebody else's Secret has already."""


class AuthorityInvalid(OperatorError):
    """The Secret of the certificate authority holds something else than a certificate and its key."""


class CertificateUnreadable(OperatorError):
    """A Secret of the operator's holds something else than a certificate, its key and its authority."""
