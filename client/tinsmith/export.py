"""`tinsmith export`: export a checkpoint on a server or on disk as a PEFT adapter or a merged model."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tinsmith.cli import naming_extras
from tinsmith.console import BaseUrl, fail

if TYPE_CHECKING:
    import tinker

TINKER = "tinker://"
FROM_FILES = "tinsmith.exports_from_files"
"""The group of the entry point that reads the files of a checkpoint.

The trainer's distribution provides this entry point.
"""


class Layout(StrEnum):
    PEFT = "peft"
    MERGED = "merged"


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(help="tinker://RUN/weights/NAME, or the directory or URL of a checkpoint's files."),
    ],
    to: Annotated[Path, typer.Option(help="Output folder; created if missing.")],
    layout: Annotated[Layout, typer.Option(help="A PEFT adapter, or the model with the adapter merged in.")],
    base_model: Annotated[
        str | None,
        typer.Option(help="Directory or hub id of the base model. Default for tinker://: the server's name for it."),
    ] = None,
    base_url: BaseUrl = None,
) -> None:
    """Export a saved checkpoint as a PEFT adapter or as a merged Hugging Face model.

    A tinker:// path is downloaded from the server over HTTP. The files of a checkpoint (the directory with
    manifest.json, or its URL, such as s3://…) are read directly.
    """
    if checkpoint.startswith(TINKER):
        _from_server(checkpoint, to, layout, base_model, base_url)
    else:
        if base_model is None:
            raise typer.BadParameter("is required for a checkpoint's files", param_hint="--base-model")
        [from_files] = entry_points(group=FROM_FILES)
        with naming_extras(from_files):
            from_files.load()(checkpoint, base_model, to, layout.value)
    print(to)


def _from_server(path: str, to: Path, layout: Layout, base_model: str | None, base_url: str | None) -> None:
    import tinker
    from transformers.utils import logging

    from tinsmith.training.errors import TrainingError
    from tinsmith.training.exports.export import export_lora_weights

    logging.disable_progress_bar()
    try:
        service = _service(base_url)
        try:
            weights = export_lora_weights(path, layout is Layout.MERGED, base_model=base_model, service=service)
        finally:
            service.close("success").result()
        weights.save_pretrained(to)
    except (TrainingError, tinker.TinkerError, OSError) as error:
        fail("export", str(error) or type(error).__name__)


def _service(base_url: str | None) -> tinker.ServiceClient:
    import tinker

    from tinsmith.credentials import api_key_from_environment, base_url_from_environment

    return tinker.ServiceClient(base_url=base_url or base_url_from_environment(), api_key=api_key_from_environment())
