"""The errors of the server. `routes/problems.py` maps them to HTTP statuses."""

from __future__ import annotations


class TinsmithError(Exception):
    """An error whose text says what happened, to what, and what to do."""


# ---- what a caller did


class AuthenticationFailed(TinsmithError):
    """The request has no key, an unknown key, or a revoked key."""


class TokenRefused(AuthenticationFailed):
    """The token is not from this server, or has expired.

    The SDK exchanges its key for a new one, and repeats the request.
    """


class NotFound(TinsmithError):
    """The object does not exist, or belongs to another tenant: the two must look the same."""


class Gone(TinsmithError):
    """The object no longer exists: a finished session, an expired result, or a deleted worker's model."""


class Unprocessable(TinsmithError):
    """The request cannot be understood well enough to become a future."""


class BodyTooLarge(TinsmithError):
    """A JSON body is over the limit of its route. Protobuf bodies over the limit fail through their future instead."""


class TooBusy(TinsmithError):
    """A budget or a rate is used up for the moment. The SDK retries after Retry-After, a training call for 300 s."""

    retry_after_seconds: float = 5.0


class TooManySamples(TooBusy):
    """The sampler's queue is full. The SDK waits and repeats `asample` without limit."""

    retry_after_seconds = 1.0


# ---- what a worker did


class WorkerError(TinsmithError):
    """A worker did not do what it was asked."""


class WorkerUnavailable(WorkerError):
    """The worker is starting, restarting, or absent. A retry may succeed."""


class WorkerAbsent(WorkerUnavailable):
    """The fleet has no such worker at present."""


class HandleClosed(WorkerUnavailable):
    """The handle was closed. Another handle may stand for the worker already."""


class WorkerUnstartable(WorkerUnavailable):
    """The worker cannot start until a person fixes its model directory or its flags; the message names which."""


class StaleEpoch(WorkerUnavailable):
    """Another server has activated the worker since, or no server has."""


class ModelNotAtWorker(WorkerError):
    """The worker does not hold this model."""


class WorkerFull(WorkerError):
    """The worker is full: the journal's disk for `Submit`, the queue for `Sample`."""


class StorageFull(WorkerError):
    """The request was not accepted, because there was no space to store it."""


# ---- what the checkpoint root did


class CheckpointRootUnavailable(TinsmithError):
    """The checkpoint root refused, or could not be reached. A retry may succeed later."""


class CheckpointDamaged(TinsmithError):
    """Files of a checkpoint do not match its manifest. A retry finds the same."""


# ---- what an operator did


class StartupError(TinsmithError):
    """The server cannot start; `tinsmith serve` prints the message and exits with 2."""
