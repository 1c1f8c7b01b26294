"""`tinsmith promote`: a stable name for a saved sampler, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tinker
import typer
from rich.table import Column, Table

from tinsmith.api import base_url_from_environment
from tinsmith.console import make_console
from tinsmith.credentials import api_key_from_environment
from tinsmith.training.errors import TrainingError
from tinsmith.training.promotion.names import (
    Expected,
    Promotion,
    promote,
    promotion_history,
    promotions,
    remove_promotion,
    rollback,
    sampler_of_run,
)

BESIDE_PATHS = 60
"""Columns for times, and headers."""
USAGE = "say NAME and a tinker:// path or --run, NAME and one of --rollback, --history and --remove, or --list alone"


def promote_command(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Name that programs use as `model`.")] = None,
    path: Annotated[
        str | None,
        typer.Argument(metavar="[PATH]", help="Sampler that the name stands for: tinker://RUN/sampler_weights/NAME."),
    ] = None,
    *,
    run: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of `tinsmith train`, whose last sampler is promoted.")
    ] = None,
    expect: Annotated[
        str | None, typer.Option(help="Change the name only if it stands for this path now; empty: only if it is new.")
    ] = None,
    back: Annotated[bool, typer.Option("--rollback", help="Restore the previous sampler.")] = False,
    history: Annotated[bool, typer.Option("--history", help="List what the name stood for, newest first.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the name, not the sampler.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List what each of your names stands for.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value, for scripts.")] = False,
    base_url: Annotated[str | None, typer.Option(help="The server; default: TINKER_BASE_URL.")] = None,
) -> None:
    """Give a saved sampler a stable name on the OpenAI endpoint, move the name, and roll it back."""
    promotes = path is not None or run is not None
    acts = [path is not None, run is not None, back, history, remove, list_]
    if sum(acts) != 1 or (name is None) is not list_ or (expect is not None and not promotes):
        raise typer.BadParameter(USAGE)
    base_url = base_url or base_url_from_environment()
    try:
        path = path if run is None else sampler_of_run(run)
        service = tinker.RestClient(base_url=base_url, api_key=api_key_from_environment())
        if list_:
            _show(promotions(service=service), as_json)
        elif history:
            _show(promotion_history(str(name), service=service), as_json)
        elif remove:
            remove_promotion(str(name), service=service)
            print(json.dumps({"removed": name}) if as_json else f"{name} is removed")
        elif back:
            _tell(rollback(str(name), service=service), as_json)
        else:
            _tell(promote(str(name), str(path), expected=_expected(expect), service=service), as_json)
            if not as_json:
                _say_how_to_use(str(name), base_url)
    except (TrainingError, tinker.TinkerError) as error:
        make_console(stderr=True).print(f"tinsmith promote: {error}")
        raise typer.Exit(1) from error


def _expected(expect: str | None) -> str | Expected | None:
    return Expected.ANYTHING if expect is None else expect or None


def _tell(promotion: Promotion, as_json: bool) -> None:
    print(json.dumps(_described(promotion)) if as_json else f"{promotion.name} stands for {promotion.path}")


def _say_how_to_use(name: str, base_url: str) -> None:
    print(f"Talk to it: tinsmith chat {name}")
    print(f"OpenAI clients: base URL {base_url.rstrip('/')}/v1, model {name}")


def _show(found: Sequence[Promotion], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"promotions": [_described(one) for one in found]}))
        return
    table = Table("name", "since", "by", Column("stands for", no_wrap=True), box=None, pad_edge=False)
    for one in found:
        by = "rollback" if one.is_rollback else "promotion"
        table.add_row(one.name, f"{one.time:%Y-%m-%d %H:%M:%S}", by, one.path)
    # A path is there to be copied: the terminal breaks its line, and no table.
    width = BESIDE_PATHS + max((len(one.name) + len(one.path) for one in found), default=0)
    make_console(width=width).print(table)


def _described(one: Promotion) -> dict[str, Any]:
    return {
        "name": one.name,
        "path": one.path,
        "time": one.time.isoformat(),
        "number": one.number,
        "is_rollback": one.is_rollback,
    }
