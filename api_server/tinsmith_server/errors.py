"""What goes wrong in the server, one family. `routes/problems.py` has the table that turns it into HTTP."""

from __future__ import annotations


class TinsmithError(Exception):
    """`str(error)` says what happened, to what, and what to do."""


# ---- what a caller did


class AuthenticationFailed(TinsmithError):
    """No key, an unknown key, or a revoked one."""


class TokenRefused(AuthenticationFailed):
    """Neither of this server nor in time: the SDK exchanges its key for another, and asks again."""


class NotFound(TinsmithError):
    """No such thing, or it belongs to another tenant: the two must look the same."""


class Gone(TinsmithError):
    """The object was here once: a finished session, an expired result, a client's weights, a deleted worker's model."""


class Unprocessable(TinsmithError):
    """The request cannot be understood well enough to become a future."""


class BodyTooLarge(TinsmithError):
    """A JSON body over the limit of its route; oversize protobuf bodies fail through their future instead."""


class TooBusy(TinsmithError):
    """Over a budget or a rate for the moment. The SDK repeats it after Retry-After, a training call for 300 s."""

    retry_after_seconds: float = 5.0


class TooManySamples(TooBusy):
    """The sampler's queue is full. The SDK waits and repeats `asample` without limit."""

    retry_after_seconds = 1.0


# ---- what a worker did


class WorkerError(TinsmithError):
    """A worker did not do what it was asked."""


class WorkerUnavailable(WorkerError):
    """Starting, restarting, or not there at all. Worth another try."""


class WorkerAbsent(WorkerUnavailable):
    """Nothing that is there just now is this worker."""


class HandleClosed(WorkerUnavailable):
    """This handle is given up. Another one may stand for the worker already."""


class WorkerUnstartable(WorkerUnavailable):
    """Not before a person has mended its model directory or its flags: it says which file or which flag."""


class StaleEpoch(WorkerUnavailable):
    """The worker has been activated by another server since, or not at all."""


class ModelNotAtWorker(WorkerError):
    """The worker does not hold this model."""


class WorkerFull(WorkerError):
    """Of `Submit`: the journal's disk is full. Of `Sample`: too many are waiting."""


class StorageFull(WorkerError):
    """Nothing was accepted, because it could not have been kept."""


# ---- what the checkpoint root did


class CheckpointRootUnavailable(TinsmithError):
    """The checkpoint root refused, or could not be reached. Worth another try once it is there again."""


class CheckpointDamaged(TinsmithError):
    """Files of a checkpoint are not those of its manifest. Another try finds the same."""


# ---- what an operator did


class StartupError(TinsmithError):
    """The server cannot start like this; `tinsmith serve` prints the sentence and exits with 2."""
