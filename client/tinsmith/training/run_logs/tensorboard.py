"""Event files that TensorBoard reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tinker_cookbook.utils import ml_log
from typing_extensions import override

from tinsmith.training.run_logs.scalars import numbers_of


class TensorBoardLogger(ml_log.Logger):
    """Writes below `directory`. TensorBoard hides what an earlier process logged of the first step here and later."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: Any = None
        self._config: str | None = None
        self._step = 0
        self._begins_at: int | None = None

    def begin_at(self, step: int) -> None:
        """What is hidden begins there, and not with the first step."""
        self._begins_at = step

    @override
    def log_hparams(self, config: Any) -> None:
        self._config = json.dumps(ml_log.dump_config(config), indent=2, default=str)

    @override
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Numbers only. Without a step they belong to the one before."""
        self._step = self._step if step is None else step
        writer = self._opened()
        for name, number in numbers_of(metrics).items():
            writer.add_scalar(name, number, self._step)
        writer.flush()

    @override
    def log_long_text(self, key: str, text: str) -> None:
        self._opened().add_text(key, text, self._step)

    @override
    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _opened(self) -> Any:
        """With the first step, since the file begins with it."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            writer: Any = SummaryWriter
            self._writer = writer(
                str(self._directory), purge_step=self._begins_at if self._begins_at is not None else self._step
            )
            if self._config is not None:
                self._writer.add_text("config", f"```\n{self._config}\n```", self._step)
        return self._writer
