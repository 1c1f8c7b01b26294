"""A library of the parts around a training loop that uses the `tinker` SDK.

The library needs the extra `training`; RL, evaluations and run logs also need the extra `cookbook`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinsmith.training.checkpoints.manager import CheckpointManager, Resumed
from tinsmith.training.checkpoints.retention import Retention
from tinsmith.training.errors import CheckpointError, EvaluationError, MinibatchFailed, NothingToTrainOn, TrainingError
from tinsmith.training.exports.export import export_lora_weights
from tinsmith.training.promotion import (
    Promotion,
    promote,
    promotion_history,
    promotions,
    remove_promotion,
    rollback,
)
from tinsmith.training.recording import RecordedSequence, Recording, group_datums, open_recording, recordings
from tinsmith.training.streams import (
    BufferClosed,
    MinibatchPlan,
    RolloutBuffer,
    RolloutGroup,
    StepReport,
    stream_minibatch_train,
)

if TYPE_CHECKING:
    from tinsmith.training.environments.functions import from_functions, from_games
    from tinsmith.training.environments.verifiers_groups import from_verifiers
    from tinsmith.training.evaluation.examples import Answer, Example
    from tinsmith.training.evaluation.inline import Evaluated, InlineEvaluator
    from tinsmith.training.evaluation.loading import load_task
    from tinsmith.training.evaluation.offline import OfflineEvaluator, Sweep
    from tinsmith.training.evaluation.tasks import ChoiceTask, Task
    from tinsmith.training.rl.shadow import ShadowClient
    from tinsmith.training.rl.trainer import RLTrainer
    from tinsmith.training.run_logs.run_log import RunLog, run_log

# These import tinker-cookbook, which is slow to import and not needed to save checkpoints.
_ON_DEMAND = {
    **dict.fromkeys(("Answer", "Example"), "evaluation.examples"),
    **dict.fromkeys(("Evaluated", "InlineEvaluator"), "evaluation.inline"),
    **dict.fromkeys(("OfflineEvaluator", "Sweep"), "evaluation.offline"),
    **dict.fromkeys(("ChoiceTask", "Task"), "evaluation.tasks"),
    **dict.fromkeys(("RunLog", "run_log"), "run_logs.run_log"),
    "load_task": "evaluation.loading",
    **dict.fromkeys(("from_functions", "from_games"), "environments.functions"),
    "RLTrainer": "rl.trainer",
    "ShadowClient": "rl.shadow",
    "from_verifiers": "environments.verifiers_groups",
}

__all__ = [
    "Answer",
    "BufferClosed",
    "CheckpointError",
    "CheckpointManager",
    "ChoiceTask",
    "Evaluated",
    "EvaluationError",
    "Example",
    "InlineEvaluator",
    "MinibatchFailed",
    "MinibatchPlan",
    "NothingToTrainOn",
    "OfflineEvaluator",
    "Promotion",
    "RLTrainer",
    "RecordedSequence",
    "Recording",
    "Resumed",
    "Retention",
    "RolloutBuffer",
    "RolloutGroup",
    "RunLog",
    "ShadowClient",
    "StepReport",
    "Sweep",
    "Task",
    "TrainingError",
    "export_lora_weights",
    "from_functions",
    "from_games",
    "from_verifiers",
    "group_datums",
    "load_task",
    "open_recording",
    "promote",
    "promotion_history",
    "promotions",
    "recordings",
    "remove_promotion",
    "rollback",
    "run_log",
    "stream_minibatch_train",
]


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_ON_DEMAND[name]}"), name)
