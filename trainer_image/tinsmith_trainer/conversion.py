"""The conversion program: `python -m tinsmith_trainer.conversion` prepares a session's model for ranks, then exits.

A cluster runs this program once, before the session reserves GPUs. If the program did not run, the worker converts the
model at the start.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import structlog

from tinsmith_trainer.engines.megatron.flags import (
    NEMO_RL,
    RankFlags,
    add_rank_flags,
    rank_placement,
    refused_rank_flags,
)
from tinsmith_trainer.engines.nemo_rl.conversion import ConversionOutOfMemory
from tinsmith_trainer.errors import TrainerError
from tinsmith_trainer.options import EXIT_USAGE, FlagParser, UsageError, add_model_flags, termination_log_of
from tinsmith_trainer.process.output import configure_logs
from tinsmith_trainer.worker.termination_log import write_termination_log

log = structlog.get_logger(__name__)

EXIT_FAILED = 1
EXIT_KILLED = 128 + signal.SIGKILL
"""The exit status of a container if the kernel killed the converting child process for lack of memory."""


class ConversionOptions(RankFlags):
    """The flags of a worker that choose the model and the number of ranks in each dimension."""

    model: str
    model_name: str
    model_revision: str | None
    max_sequence_length: int | None
    engine: str
    max_rank: int
    termination_log: Path | None
    log_format: str
    log_level: str


def main() -> int:
    # Process 1 of a container receives no signal without a handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)
    return run(sys.argv[1:])


def run(arguments: Sequence[str]) -> int:
    """Convert the model and return the exit status.

    The status is 0 if ranks can start, otherwise an EXIT_… constant. The last line of the program's output gives the
    reason for the status.
    """
    try:
        options = parse_options(arguments)
    except UsageError as error:
        return _fail(termination_log_of(arguments), error, EXIT_USAGE)
    configure_logs(options.log_format, options.log_level)
    try:
        _prepare_model(options)
    except ConversionOutOfMemory as error:
        return _fail(options.termination_log, error, EXIT_KILLED)
    except TrainerError as error:
        return _fail(options.termination_log, error, EXIT_FAILED)
    except Exception as error:
        log.exception("the conversion failed")
        return _fail(options.termination_log, error, EXIT_FAILED)
    return 0


def parse_options(arguments: Sequence[str]) -> ConversionOptions:
    """Parse the flags. Raises UsageError."""
    parser = FlagParser(prog="tinsmith-conversion", description=__doc__, allow_abbrev=False)
    add_model_flags(parser)
    parser.add_argument("--engine", choices=(NEMO_RL,), default=NEMO_RL, help="the one that needs a conversion")
    parser.add_argument("--max-rank", type=int, default=128, help="highest rank of an adapter")
    parser.add_argument("--termination-log", type=Path, help="file for the reason, as JSON, of a failure")
    parser.add_argument("--log-format", choices=("json", "console"), default="json")
    parser.add_argument("--log-level", default="info")
    add_rank_flags(parser)
    options = parser.parse_args(arguments, namespace=ConversionOptions())
    refusal = refused_rank_flags(options.engine, options, sampling=False)
    if refusal is not None:
        parser.error(refusal)
    return options


def _prepare_model(options: ConversionOptions) -> None:
    from tinsmith_trainer.torch_model.base_model import model_directory
    from tinsmith_trainer.torch_model.stored_weights import checked_config

    directory = model_directory(options.model, options.model_revision)
    config = checked_config(directory)
    if rank_placement(options.engine, options).gpus_per_node:
        _convert(directory, config, options)
    else:
        log.info("ranks on CPUs read the model's own files: there is nothing to convert", directory=str(directory))


def _convert(directory: Path, config: Any, options: ConversionOptions) -> None:
    from tinsmith_trainer.engines.megatron.flags import MegatronSettings
    from tinsmith_trainer.engines.nemo_rl.group import prepare
    from tinsmith_trainer.torch_model.loading import describe_model

    info = describe_model(options.model, directory, config)
    parallelism = rank_placement(options.engine, options).parallelism
    prepare(directory, info, parallelism, MegatronSettings(max_rank=options.max_rank))


def _fail(termination_log: Path | None, error: Exception, status: int) -> int:
    write_termination_log(termination_log, error)
    sentence = str(error) if isinstance(error, (TrainerError, UsageError)) else f"{type(error).__name__}: {error}"
    print(f"tinsmith-conversion: {sentence}", file=sys.stderr, flush=True)
    return status


def _leave(number: int, _frame: FrameType | None) -> None:
    """Exit at once. Later runs ignore a half-converted model, because the marker of a complete conversion is missing.

    The child process that converts the model ends, too.
    """
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
