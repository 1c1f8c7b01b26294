"""The errors of the library. `str(error)` says what happened, to what, and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class TrainingError(Exception):
    """The base class of the errors of this package."""


class NotOffered(TrainingError):
    """An error for a function that this server does not offer."""


class DownloadDamaged(TrainingError):
    """An error for a file that was not downloaded completely."""


class ExportError(TrainingError):
    """The base class of errors when weights are exported."""


class NoSuchWeights(ExportError):
    """An error for a path at which this key can see no checkpoint on the server."""


class BaseModelUnusable(ExportError):
    """An error for a base model that is missing, cannot be read, or is not the adapter's base model."""


class PromotionRefused(TrainingError):
    """An error for a promotion that the server refuses, or for a promoted name that does not exist."""


class CheckpointError(TrainingError):
    """The base class of errors about checkpoints."""


class NoCheckpoint(CheckpointError):
    """An error if there is no checkpoint at the step, or if the run has no checkpoint."""


class CheckpointDamaged(CheckpointError):
    """An error for a checkpoint whose files differ from the files that were written."""


class CheckpointExists(CheckpointError):
    """An error if the step already has a complete checkpoint."""


class SaveFailed(CheckpointError):
    """An error for a save that failed. `__cause__` is the reason. Complete checkpoints are not affected."""

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

    Its next step would include the gradient of the cancelled step.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"cancelled in step {step}, whose gradient may still be on the server: load a saved state before you "
            "continue"
        )
        self.step = step


class EvaluationError(TrainingError):
    """The base class of errors about tasks, evaluators and their results."""


class TaskFileError(EvaluationError):
    """An error for a file of examples, or the name of a task, that cannot be used. The message names the line."""


class GradeFailed(EvaluationError):
    """An error for a grader that raised an error, or that returned something other than finite numbers."""


class ResultsUnfit(EvaluationError):
    """An error for results that belong to other tasks, cannot be read, or are used by another sweep."""


class RunLogError(TrainingError):
    """The base class of errors about run logs."""


class BackendMissing(RunLogError):
    """An error for a backend whose package is not installed. The message ends with the command that installs it."""


class BackendRefused(RunLogError):
    """An error for a run that a backend refuses, for example because the backend requires a key."""


class MetricsLost(RunLogError):
    """An error for a run whose record cannot be written, for example because the disk is full."""


class RunError(TrainingError):
    """The base class of errors of `tinsmith train`."""


class BadConfig(RunError):
    """An error for settings that are missing, unknown or wrong. The message has a line for each of them."""


class BadData(RunError):
    """An error for lines that are not examples. The message has `file:line` and the reason for each of them."""


class ServerNotReady(RunError):
    """An error if no server answers, or it does not serve the model."""


class NothingToTrainOn(TrainingError):
    """An error that is raised after many groups in a row had no data.

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
    """An error for an environment that breaks the rules of environments. Only its group is lost."""
