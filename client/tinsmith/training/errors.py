"""The errors of the library. `str(error)` says what happened, to what, and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class TrainingError(Exception):
    """The base class of this package's errors."""


class NotOffered(TrainingError):
    """An error for something that this server does not offer."""


class DownloadDamaged(TrainingError):
    """An error for a file that was not downloaded completely."""


class ExportError(TrainingError):
    """The base class of errors when weights are exported."""


class NoSuchWeights(ExportError):
    """An error for a path at which the server shows this key no checkpoint."""


class BaseModelUnusable(ExportError):
    """An error for a base model that is missing or unreadable, or is not the adapter's base model."""


class PromotionRefused(TrainingError):
    """An error for a promotion that the server refuses, or a name that it does not have."""


class CheckpointError(TrainingError):
    """The base class of errors about checkpoints."""


class NoCheckpoint(CheckpointError):
    """An error if there is no checkpoint at the step, or none at all."""


class CheckpointDamaged(CheckpointError):
    """An error for a checkpoint whose files are not those that were written."""


class CheckpointExists(CheckpointError):
    """An error if the step already has a complete checkpoint."""


class SaveFailed(CheckpointError):
    """An error for a save that failed. `__cause__` is the reason. Complete checkpoints are not affected."""

    def __init__(self, step: int, cause: BaseException) -> None:
        super().__init__(f"saving step {step}: {str(cause) or type(cause).__name__}")
        self.step = step


class UnfitLoopState(CheckpointError, TypeError):
    """An error for a value in `loop_state` that could only be loaded by running code from the checkpoint."""


class StateGone(CheckpointError):
    """An error if the server no longer has the state of a checkpoint."""


class MinibatchFailed(TrainingError):
    """An error for a failed minibatch; no optimizer step was made. `__cause__` is the SDK's error."""

    def __init__(self, minibatch: int, step: int, cause: BaseException) -> None:
        super().__init__(
            f"minibatch {minibatch} of step {step}: {cause}; gradients of the step's other minibatches are still on "
            "the server: load the last saved state before you continue"
        )
        self.minibatch = minibatch
        self.step = step


class ShadowCutOff(TrainingError):
    """An error for a shadow that was cancelled in a step. Its next step would contain the cancelled step's gradient."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"cancelled in step {step}, whose gradient may still be on the server: load a saved state before you "
            "continue"
        )
        self.step = step


class EvaluationError(TrainingError):
    """The base class of errors about tasks, evaluators and their results."""


class TaskFileError(EvaluationError):
    """An error for a file of examples or a task name that cannot be used. It names the line."""


class GradeFailed(EvaluationError):
    """An error for a grader that raised, or returned something other than finite numbers."""


class ResultsUnfit(EvaluationError):
    """An error for results that belong to other tasks, cannot be read, or are in use by another sweep."""


class RunLogError(TrainingError):
    """The base class of errors about run logs."""


class BackendMissing(RunLogError):
    """An error if a backend's package is not installed. The message ends with the command that installs it."""


class BackendRefused(RunLogError):
    """An error if a backend refuses the run, for example because it requires a key."""


class MetricsLost(RunLogError):
    """An error if the run's record cannot be written, for example because the disk is full."""


class RunError(TrainingError):
    """The base class of errors of `tinsmith train`."""


class BadConfig(RunError):
    """An error for settings that are missing, unknown or wrong, with a line for each."""


class BadData(RunError):
    """An error for lines that are not examples, with `file:line` and the reason for each."""


class ServerNotReady(RunError):
    """An error if no server answers, or it does not serve the model."""


class NothingToTrainOn(TrainingError):
    """An error after many groups in a row without data. `causes` counts the reasons by kind."""

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
    """An error for an environment that misbehaves. Only its group is lost."""
