"""`tinsmith runs`: list the training runs of a server, and print the steps of a run, also while the run trains."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.table import Table

from tinsmith.api import Api, ApiError, NotYet, Unreachable
from tinsmith.console import AsJson, BaseUrl, duration, fail, figure, make_console, print_error
from tinsmith.credentials import api_key_from_environment, base_url_from_environment

FOLLOW_SECONDS = 2.0
"""The pause between two requests for new steps."""

ENDED = ("released", "failed", "corrupted")
FIGURES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr", "tokens": "tokens", "seconds": "seconds"}
"""The fields of a step in the order in which they are printed, and the name of each on the terminal."""

Fields = Mapping[str, Any]
"""A JSON object of the server's answer."""


def runs(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Print the steps of this run, by its ID or `tinker://` path.")
    ] = None,
    *,
    base_url: BaseUrl = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Print this many runs or steps, the newest.")] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new steps until the run ends.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the training runs of a server with step, loss and time left, or print the steps of a run."""
    if follow and not run:
        raise typer.BadParameter("name the RUN to follow; `tinsmith runs` lists the runs", param_hint="--follow")
    try:
        with (
            Api(base_url or base_url_from_environment(), api_key_from_environment()) as api,
            suppress(KeyboardInterrupt),
        ):
            if not run:
                _print_runs(api.training_runs(limit), as_json=as_json)
            else:
                _print_series(api, run.removeprefix("tinker://").partition("/")[0], limit, follow, as_json)
    except ApiError as error:
        fail("runs", str(error))


def _print_runs(found: Sequence[Fields], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
    elif not found:
        make_console().print("no training runs yet; a program creates one with create_lora_training_client()")
    else:
        make_console().print(_table(found))


def _table(found: Sequence[Fields]) -> Table:
    named = any(run.get("display_name") for run in found)
    table = Table(box=None, pad_edge=False)
    # A narrow terminal must not cut the IDs, which are copied from here.
    table.add_column("run", min_width=max(len(run["training_run_id"]) for run in found))
    for heading in (*(["name"] if named else []), "model", "state"):
        table.add_column(heading)
    for heading in ("step", "loss", "tokens/s", "left"):
        table.add_column(heading, justify="right")
    for run in found:
        name = [run.get("display_name") or ""] if named else []
        table.add_row(run["training_run_id"], *name, run["base_model"], _state(run), *_progress(run))
    return table


def _state(run: Fields) -> str:
    place = run.get("queue_position")
    return f"{run['state']}, place {place}" if place is not None else str(run["state"])


def _progress(run: Fields) -> tuple[str, str, str, str]:
    progress = run.get("progress") or {}
    total, left = progress.get("total_steps"), progress.get("eta_seconds")
    step = str(progress.get("step", 0)) + (f" of {total}" if total is not None else "")
    loss, rate = progress.get("loss"), progress.get("tokens_per_second")
    return (
        step,
        figure(loss) if loss is not None else "",
        f"{rate:,.0f}" if rate is not None else "",
        duration(left) if left else "",
    )


def _print_series(api: Api, run_id: str, limit: int, follow: bool, as_json: bool) -> None:
    """Print the newest points of the series, then the new points until the run ends if `follow` is true."""
    series = _Series(api, run_id)
    points = deque(series.new_points(), maxlen=limit)
    if not points and not follow:
        make_console(stderr=True).print(f"{run_id} has run no optimizer step yet; --follow waits for the first")
    _print_points(points, as_json=as_json)
    is_away = False
    while follow and not series.has_ended:
        time.sleep(FOLLOW_SECONDS)
        try:
            _print_points(series.new_points(), as_json=as_json)
            is_away = False
        except (Unreachable, NotYet) as error:
            if not is_away:
                print_error(f"tinsmith runs: {error}; trying again until the server answers")
            is_away = True


class _Series:
    """The series of a run, read from a cursor. `has_ended` is true once no later point can come."""

    def __init__(self, api: Api, run_id: str) -> None:
        self.has_ended = False
        self._api = api
        self._run_id = run_id
        self._cursors: dict[str, int] = {}
        self._ended_before = False

    def new_points(self) -> Iterator[Fields]:
        """Yield the points after the last ones, oldest first. After an error, the next call continues from there."""
        has_ended = self._api.training_run(self._run_id)["state"] in ENDED
        more = True
        while more:
            part = self._api.run_series(self._run_id, **self._cursors)
            self._cursors = {name: part[name] for name in ("after", "after_reported")}
            yield from sorted([*part["steps"], *part["reported"]], key=_time_of)
            more = part["more"]
        # The worker's last steps may arrive after the end of the run, so one more read follows.
        self.has_ended, self._ended_before = has_ended and self._ended_before, has_ended


def _time_of(point: Fields) -> datetime:
    return datetime.fromisoformat(point["time"])


def _print_points(points: Iterable[Fields], *, as_json: bool) -> None:
    for point in points:
        # Output to a pipe would otherwise arrive in blocks.
        print(json.dumps(point) if as_json else _line(point), flush=True)


def _line(point: Fields) -> str:
    """Return the line of a step, or of the values that the program has reported for a step."""
    figures = point.get("values") or {name: point[key] for key, name in FIGURES.items() if key in point}
    words = [f"step {point['step']}", *(f"{name} {figure(value)}" for name, value in figures.items())]
    return "  ".join(words)
