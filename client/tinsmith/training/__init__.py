"""The library around a training loop, on the `tinker` SDK: `pip install 'tinsmith[training]'`."""

from __future__ import annotations

from tinsmith.training.checkpoints.manager import CheckpointManager, Resumed
from tinsmith.training.checkpoints.retention import Retention
from tinsmith.training.errors import CheckpointError, TrainingError

__all__ = ["CheckpointError", "CheckpointManager", "Resumed", "Retention", "TrainingError"]
