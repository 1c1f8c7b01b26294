"""`tinsmith models`: what a server serves."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from tinsmith.api import Api, ApiError, ServedModel, base_url_from_environment
from tinsmith.console import make_console
from tinsmith.credentials import api_key_from_environment


def models(
    base_url: Annotated[str | None, typer.Option(help="The server; default: TINKER_BASE_URL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array, for scripts.")] = False,
) -> None:
    """List the base models of a server, by the names that programs use."""
    try:
        with Api(base_url or base_url_from_environment(), api_key_from_environment()) as api:
            served = api.served_models()
    except ApiError as error:
        make_console(stderr=True).print(f"tinsmith models: {error}")
        make_console(stderr=True).print("`tinsmith doctor` finds out why.")
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps([asdict(model) for model in served]))
    else:
        make_console().print(_table(served))


def _table(served: list[ServedModel]) -> Table:
    table = Table("model", "longest sequence", box=None, pad_edge=False)
    for model in served:
        table.add_row(model.name, f"{model.max_context_length} tokens" if model.max_context_length else "unknown")
    return table
