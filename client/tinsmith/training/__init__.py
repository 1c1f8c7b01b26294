"""The library around a training loop, on the `tinker` SDK: `pip install 'tinsmith[training]'`."""

from __future__ import annotations

from tinsmith.training.checkpoints.manager import CheckpointManager, Resumed
from tinsmith.training.checkpoints.retention import Retention
from tinsmith.training.errors import CheckpointError, MinibatchFailed, TrainingError
from tinsmith.training.run_logs.run_log import RunLog, run_log
from tinsmith.training.streams.rollouts import BufferClosed, RolloutBuffer, RolloutGroup
from tinsmith.training.streams.step import MinibatchPlan, StepReport
from tinsmith.training.streams.train import stream_minibatch_train

__all__ = [
    "BufferClosed",
    "CheckpointError",
    "CheckpointManager",
    "MinibatchFailed",
    "MinibatchPlan",
    "Resumed",
    "Retention",
    "RolloutBuffer",
    "RolloutGroup",
    "RunLog",
    "StepReport",
    "TrainingError",
    "run_log",
    "stream_minibatch_train",
]
