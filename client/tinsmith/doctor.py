"""`tinsmith doctor`: why a program does not reach its server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from tinsmith.api import BASE_URL_VARIABLE, base_url_from_environment
from tinsmith.checks import CheckResult, ClientEnvironment, Status, diagnose
from tinsmith.console import make_console
from tinsmith.credentials import API_KEY_VARIABLE

MARKS = {Status.OK: ("✓", "green"), Status.FAILED: ("✗", "red"), Status.SKIPPED: ("-", "yellow")}


def doctor(
    base_url: Annotated[str | None, typer.Option(help="The server; default: TINKER_BASE_URL.")] = None,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="How long to retry a server that does not answer.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """Check address, SDK, server, key and tokenizers, and show how to fix what fails; list waiting models.

    Exits with 1 when a check fails.
    """
    environment = ClientEnvironment(
        base_url=base_url or base_url_from_environment(),
        environment_url=base_url or os.environ.get(BASE_URL_VARIABLE) or None,
        api_key=os.environ.get(API_KEY_VARIABLE) or None,
    )
    results = diagnose(environment, wait_seconds=wait)
    healthy = _print_json(results) if as_json else _print_lines(results)
    raise typer.Exit(0 if healthy else 1)


def _print_lines(results: Iterable[CheckResult]) -> bool:
    """Each as it is found: an unreachable server takes its time."""
    console = make_console()
    healthy = True
    for result in results:
        console.print(Text.assemble(MARKS[result.status], f" {result.check}: {result.detail}"))
        if result.cure is not None:
            console.print(f"    cure: {result.cure}")
        healthy = healthy and result.status is not Status.FAILED
    return healthy


def _print_json(results: Iterable[CheckResult]) -> bool:
    listed = list(results)
    healthy = all(result.status is not Status.FAILED for result in listed)
    print(json.dumps({"healthy": healthy, "checks": [asdict(result) for result in listed]}))
    return healthy
