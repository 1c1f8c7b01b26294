"""The errors of the server. `routes/http/problems.py` maps errors to HTTP statuses."""

from __future__ import annotations


class TinsmithError(Exception):
    """An error with a message for the user: what happened, to what, and what to do."""


# ---- errors caused by a client


class AuthenticationFailed(TinsmithError):
    """The request has no key, an unknown key, or a revoked key."""


class TokenRefused(AuthenticationFailed):
    """The token was not issued by this server, or has expired.

    The SDK exchanges its key for a new token, and repeats the request.
    """


class Forbidden(TinsmithError):
    """The key is known, but its role does not allow the call."""


class NotFound(TinsmithError):
    """The object does not exist, or belongs to another tenant. Another tenant's object looks like a missing object."""


class Gone(TinsmithError):
    """The object no longer exists: a finished session, an expired result, or a deleted worker's model."""


class Unprocessable(TinsmithError):
    """The request cannot be understood well enough to create a future."""


class Conflict(TinsmithError):
    """The change would break a rule of the installation. A repetition cannot succeed."""


class BodyTooLarge(TinsmithError):
    """A JSON body is over the limit of its route. A protobuf body over the limit is accepted, and its future fails."""


class TooBusy(TinsmithError):
    """A budget or a rate is used up for the moment.

    The SDK repeats the request after Retry-After, and repeats a training call for 300 s.
    """

    retry_after_seconds: float = 5.0


class TooManySamples(TooBusy):
    """The sampler's queue is full. The SDK waits and repeats `asample` without limit."""

    retry_after_seconds = 1.0


# ---- errors of a worker


class WorkerError(TinsmithError):
    """A worker did not carry out a call. The base class of all errors of workers."""


class WorkerUnavailable(WorkerError):
    """The worker is starting, restarting, or absent. A retry may succeed."""


class WorkerAbsent(WorkerUnavailable):
    """The fleet has no worker with this ID at present."""


class HandleClosed(WorkerUnavailable):
    """The handle was closed. The fleet may already have another handle for the worker."""


class WorkerUnstartable(WorkerUnavailable):
    """The worker cannot start until a person corrects its model directory or its flags.

    The message names the mistake.
    """


class StaleEpoch(WorkerUnavailable):
    """Another server has activated the worker in the meantime, or no server has activated the worker."""


class ModelNotAtWorker(WorkerError):
    """The worker does not hold this model."""


class WorkerFull(WorkerError):
    """The worker has no room: on the journal's disk for `Submit`, or in the queue for `Sample`."""


class StorageFull(WorkerError):
    """The request was not accepted, because there was no space to store it."""


# ---- errors of the checkpoint root


class CheckpointRootUnavailable(TinsmithError):
    """The checkpoint root refused a request, or could not be reached. A retry may succeed later."""


class CheckpointDamaged(TinsmithError):
    """Files of a checkpoint differ from the checkpoint's manifest. A retry cannot succeed."""


# ---- errors of the installation


class StartupError(TinsmithError):
    """The server cannot start. `tinsmith serve` prints the message and exits with status 2."""
