"""What can go wrong in the library around a loop. `str(error)` says what happened, to what, and what to do."""

from __future__ import annotations

from collections.abc import Mapping


class TrainingError(Exception):
    """Of this package."""


class NotOffered(TrainingError):
    """This server has no call for it, or does not give this away."""


class DownloadDamaged(TrainingError):
    """A file did not come whole from the server."""


class ExportError(TrainingError):
    """Of weights that leave a server."""


class NoSuchWeights(ExportError):
    """The server shows this key no checkpoint of that path."""


class BaseModelUnusable(ExportError):
    """Its files are not here, cannot be read, or are not those that the adapter was trained on."""


class PromotionRefused(TrainingError):
    """The server does not let a name stand for that, or has no such name."""


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


class ShadowCutOff(TrainingError):
    """A shadow was cancelled in the middle of a step, whose gradient its next step would be made of."""

    def __init__(self, step: int) -> None:
        super().__init__(
            f"cancelled in step {step}, whose gradient may be on the server still: load a saved state before you go on"
        )
        self.step = step


class EvaluationError(TrainingError):
    """Of tasks, evaluators and their results."""


class TaskFileError(EvaluationError):
    """A file of examples, or a name of tasks, that cannot be used; says at which line."""


class GradeFailed(EvaluationError):
    """A grader gave something else than finite numbers, or raised; then `__cause__` is what."""


class ResultsUnfit(EvaluationError):
    """A directory has results that are not of these tasks, cannot be read, or are being written by another sweep."""


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


class NothingToTrainOn(TrainingError):
    """So many groups in a row gave no data that the run would go on for ever. `causes` counts why, by kind."""

    def __init__(self, groups: int, causes: Mapping[str, int], step: int) -> None:
        counted = ", ".join(f"{kind} ({count})" for kind, count in sorted(causes.items(), key=lambda item: -item[1]))
        super().__init__(
            f"{groups} groups in a row gave nothing to train on, after {step} steps: {counted}; each failure is in the "
            "log. Where rewards are equal the task is solved, or no answer earns more than another"
        )
        self.groups = groups
        self.causes = dict(causes)
        self.step = step


class EnvironmentFailed(TrainingError):
    """An environment did not do its part. It costs its group, as whatever else an environment raises."""
