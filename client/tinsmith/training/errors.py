"""The errors of the library. `str(error)` says what happened, which object is concerned, and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class TrainingError(Exception):
    """The base class of the errors of this package."""


class NotOffered(TrainingError):
    """An error for a function that this server does not offer."""


class DownloadDamaged(TrainingError):
    """An error for a file that was not downloaded completely."""


class ExportError(TrainingError):
    """The base class of errors of exports of weights."""


class NoSuchWeights(ExportError):
    """An error for a path without a checkpoint that this key may see on the server."""


class BaseModelUnusable(ExportError):
    """An error for a base model that is missing, unreadable, or not the base model of the adapter."""


class PromotionRefused(TrainingError):
    """An error for a promotion that the server refuses, or for a promoted name that does not exist."""


class RecordingRefused(TrainingError):
    """An error for a recording that the server refuses, or for a recording that was deleted or has expired."""


class CheckpointError(TrainingError):
    """The base class of errors about checkpoints."""


class NoCheckpoint(CheckpointError):
    """An error for a step without a checkpoint, or a run without a checkpoint."""


class CheckpointDamaged(CheckpointError):
    """An error for a checkpoint with files that differ from the files that were written."""


class CheckpointExists(CheckpointError):
    """An error if the step already has a complete checkpoint."""


class SaveFailed(CheckpointError):
    """An error for a save that failed.

    `__cause__` is the exception that made the save fail. A failed save does not affect complete checkpoints.
    """

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"saving step {step}: {str(cause) or type(cause).__name__}")
        self.step = step


class UnfitLoopState(CheckpointError, TypeError):
    """An error for a value in `loop_state` that cannot be loaded without running code from the checkpoint."""


class StateGone(CheckpointError):
    """An error if the server no longer has the state of a checkpoint."""


class MinibatchFailed(TrainingError):
    """An error for a minibatch that failed before the optimizer step. `__cause__` is the SDK's error."""

    def __init__(self, minibatch: int, step: int, cause: BaseException) -> None:
        super().__init__(
            f"minibatch {minibatch} of step {step}: {cause}; gradients of the step's other minibatches are still on "
            "the server: load the last saved state before you continue"
        )
        self.minibatch = minibatch
        self.step = step


class ShadowCutOff(TrainingError):
    """An error for a shadow that was cancelled during a step.

    After a cancelled step, the next step of the shadow would include the gradient of the cancelled step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"cancelled in step {step}, whose gradient may still be on the server: load a saved state before you "
            "continue"
        )
        self.step = step


class EvaluationError(TrainingError):
    """The base class of errors about tasks, evaluators and results."""


class TaskFileError(EvaluationError):
    """An error for an unusable file of examples, or an unusable name of a task. The message names the line."""


class GradeFailed(EvaluationError):
    """An error for a grader that raised an error, or that returned something other than finite numbers."""


class ResultsUnfit(EvaluationError):
    """An error for results that belong to other tasks, are unreadable, or are in use by another sweep."""


class RunLogError(TrainingError):
    """The base class of errors about run logs."""


class BackendMissing(RunLogError):
    """An error for a backend without an installed package.

    The message ends with the command that installs the package.
    """


class BackendRefused(RunLogError):
    """An error for a run that a backend refuses, for example because the backend requires a key."""


class MetricsNotReported(RunLogError):
    """An error for metrics that the server did not accept. The files of the run have them."""


class MetricsLost(RunLogError):
    """An error for a failed write to the record of a run, for example because the disk is full."""


class RunError(TrainingError):
    """The base class of errors of `tinsmith train`."""


class BadConfig(RunError):
    """An error for settings that are missing, unknown or wrong. The message has one line for each wrong setting."""


class BadData(RunError):
    """An error for lines that are not examples.

    For each wrong line, the message contains `file:line` and the reason.
    """


class ServerNotReady(RunError):
    """An error if no server answers, or if the server does not serve the model."""


class NothingToTrainOn(TrainingError):
    """An error for a run with too many consecutive groups without data.

    `causes` is the number of groups for each kind of reason.
    """

    def __init__(self, groups: int, causes: Mapping[str, int], step: int) -> None:
        counted = ", ".join(f"{kind} ({count})" for kind, count in sorted(causes.items(), key=lambda item: -item[1]))
        super().__init__(
            f"{groups} groups in a row gave nothing to train on, after {step} steps: {counted}; each failure is in the "
            "log. Equal rewards mean that the task is solved, or that no answer earns more than another"
        )
        self.groups = groups
        self.causes = dict(causes)
        self.step = step


class EnvironmentFailed(TrainingError):
    """An error for an environment that breaks the rules of environments. Only the environment's group is lost."""
