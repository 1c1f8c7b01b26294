"""The trainer's commands: `make-tiny-model`, and the part of `tinsmith export` that writes files.

Both commands also run as `python -m tinsmith_trainer.cli`, because the worker's image has no `tinsmith` program. Torch
is imported only when a command runs, so that a wrong option is reported at once.
"""

from __future__ import annotations

import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tinsmith_trainer.errors import CheckpointInvalid, TrainerError
from tinsmith_trainer.process import gc_pause
from tinsmith_trainer.process.output import make_console

if TYPE_CHECKING:
    from tinsmith_trainer.checkpoints.checkpoint_root import LoadedCheckpoint
    from tinsmith_trainer.engines.base import ExportLayout
    from tinsmith_trainer.torch_model.base_model import BaseModelInfo


class ModelFamily(StrEnum):
    QWEN3 = "qwen3"
    LLAMA3 = "llama3"
    QWEN3_MOE = "qwen3-moe"


class Layout(StrEnum):
    PEFT = "peft"
    MERGED = "merged"


def make_tiny_model(
    directory: Annotated[Path, typer.Argument(help="Output folder; created if missing.")],
    family: Annotated[ModelFamily, typer.Option(help="Architecture and chat tokens.")] = ModelFamily.QWEN3,
    seed: Annotated[int, typer.Option(help="Seed for the random weights.")] = 0,
) -> None:
    """Write a random model of 0.2 million parameters and a tokenizer, for experiments.

    The same arguments write the same bytes. The command downloads nothing.
    """
    _make_output_folder(directory, "make-tiny-model")
    with gc_pause():
        from tinsmith_trainer.torch_model.tiny_model import make_tiny_model as write_tiny_model

    _hide_progress_bars()
    write_tiny_model(directory, family=family.value, seed=seed)
    print(directory)


def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint's directory, the one with manifest.json; or its URL, such as s3://….")
    ],
    base_model: Annotated[str, typer.Option(help="Directory or hub id of the base model.")],
    to: Annotated[Path, typer.Option(help="Output folder; created if missing.")],
    layout: Annotated[Layout, typer.Option(help="A PEFT adapter, or the model with the adapter merged in.")],
) -> None:
    """Turn a saved checkpoint into a PEFT adapter or a merged Hugging Face model."""
    if checkpoint.startswith("tinker://"):
        _fail(
            f"{checkpoint} is a name that only its server can resolve: the program `tinsmith export` asks it. "
            "Or give the checkpoint's directory, DATA/checkpoints/weights/RUN/SEQ-EPOCH of the server's machine, "
            "or weights/RUN/SEQ-EPOCH below another checkpoint root."
        )
    export_files(checkpoint, base_model, to, layout.value)
    print(to)


def export_files(checkpoint: str, base_model: str, to: Path, layout: ExportLayout) -> None:
    """Export a checkpoint's files, for the `tinsmith` program.

    Raises typer.Exit after an error message.
    """
    with gc_pause():
        from tinsmith_trainer.engines.peft import build_peft_engine
        from tinsmith_trainer.torch_model.loading import load_torch_model

    _hide_progress_bars()
    try:
        engine = build_peft_engine(load_torch_model(base_model))
        loaded = _read_checkpoint(checkpoint, engine.base_model())
        _make_output_folder(to, "export")
        engine.export(loaded.state, to, layout)
    except TrainerError as error:
        _fail(str(error))
    if loaded.trained_in:
        _say(
            f"the adapter was trained on {base_model} in {loaded.trained_in}; on whole weights it may do a little worse"
        )


def _read_checkpoint(checkpoint: str, base: BaseModelInfo) -> LoadedCheckpoint:
    """Read a checkpoint.

    The manifest is trusted, and the digests in the manifest verify the checkpoint's other files.
    """
    from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot

    url = checkpoint if "://" in checkpoint else f"file://{Path(checkpoint).absolute()}"
    root, _, directory = url.rstrip("/").rpartition("/")
    checkpoints = CheckpointRoot(root)
    try:
        digest = checkpoints.digest_of(directory)
    except CheckpointInvalid as error:
        _fail(f"{checkpoint} is not a checkpoint: {error}")
    return checkpoints.read(directory, digest, base)


def _make_output_folder(folder: Path, command: str) -> None:
    """Create the folder if it does not exist.

    Raises typer.Exit, after an error message, if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        make_console(stderr=True).print(f"tinsmith {command}: {folder} cannot be written: {error.strerror}")
        raise typer.Exit(2) from error


def _hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _say(sentence: str) -> None:
    make_console(stderr=True).print(f"tinsmith export: {sentence}")


def _fail(sentence: str) -> NoReturn:
    _say(sentence)
    raise typer.Exit(1)


if __name__ == "__main__":
    commands = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    commands.command()(make_tiny_model)
    commands.command()(export)
    commands()
