"""What can go wrong in the library around a loop. `str(error)` says what happened, to what, and what to do."""

from __future__ import annotations


class TrainingError(Exception):
    """Of this package."""


class CheckpointError(TrainingError):
    """Of checkpoints."""


class NoCheckpoint(CheckpointError):
    """There is none at that step, or at all."""


class CheckpointDamaged(CheckpointError):
    """Its files are not those that were written."""


class CheckpointExists(CheckpointError):
    """A whole one is at that step already."""


class SaveFailed(CheckpointError):
    """A save did not come to its end. `__cause__` is why; all whole checkpoints are as they were."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"saving step {step}: {str(cause) or type(cause).__name__}")
        self.step = step


class UnfitLoopState(CheckpointError, TypeError):
    """Something in it cannot be read back without running code that was saved with it."""


class NotOffered(CheckpointError):
    """The server has no call that gives this file."""


class StateGone(CheckpointError):
    """The server does not have the state any more that a checkpoint refers to."""


class MinibatchFailed(TrainingError):
    """The server refused or failed a minibatch, and there was no optimizer step. `__cause__` is the SDK's error."""

    def __init__(self, minibatch: int, step: int, cause: BaseException) -> None:
        super().__init__(
            f"minibatch {minibatch} of step {step}: {cause}; gradients of the step's other minibatches are still on "
            "the server: load the last saved state before you go on"
        )
        self.minibatch = minibatch
        self.step = step


class RunLogError(TrainingError):
    """Of the places where a run's metrics go."""


class BackendMissing(RunLogError):
    """The package of a backend is not installed; the sentence ends with the line that installs it."""


class BackendRefused(RunLogError):
    """A backend does not take this run: it wants a key, say."""


class MetricsLost(RunLogError):
    """The run's record cannot be written: its disk is full, say."""


class RunError(TrainingError):
    """Of a run of `tinsmith train`."""


class BadConfig(RunError):
    """A setting is missing, unknown or wrong: a line for each."""


class BadData(RunError):
    """Lines are no examples: `file:line` and why, for each."""


class ServerNotReady(RunError):
    """No server answers, or it does not serve the model."""
