"""`tinsmith promote`: stable names for saved samplers on a server's OpenAI and Anthropic endpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import tinker
import typer
from rich.table import Column, Table

from tinsmith.console import AsJson, BaseUrl, fail, make_console
from tinsmith.credentials import api_key_from_environment, base_url_from_environment
from tinsmith.training.errors import PromotionRefused, TrainingError
from tinsmith.training.server_calls import Service, refusal, send

PROMOTIONS = "/api/v1/promotions"
RUN_SUMMARY = "summary.json"


class Expected(Enum):
    """The default of `expected`, which is neither a path nor None."""

    ANYTHING = "whatever the name stands for"


@dataclass(frozen=True, slots=True)
class Promotion:
    """A promoted name: since `time`, the name points to the sampler at `path`.

    `number` counts the changes of the name, from 1.
    """

    name: str
    path: str
    time: datetime
    number: int
    is_rollback: bool


def promote(
    name: str,
    path: str,
    *,
    expected: str | Expected | None = Expected.ANYTHING,
    service: Service | None = None,
) -> Promotion:
    """Make a name point to a saved sampler, such as `tinker://RUN/sampler_weights/NAME`, from the next request on.

    `expected` is the path to which the name must point now, or None if the name must be new. In all functions of this
    module, the default of `service` is a client with the server and key from the environment.

    Raises PromotionRefused with the server's message, NotOffered if the server has no promotions, and the errors of the
    SDK.
    """
    unchecked = expected is Expected.ANYTHING
    body = {"model_path": path} | ({} if unchecked else {"expected_path": expected})
    return _promotion(_send(service, "PUT", _address(name), body))


def rollback(name: str, *, service: Service | None = None) -> Promotion:
    """Make a name point to its previous sampler.

    A second rollback makes the name point to the sampler before the previous sampler.

    The request contains the number of the current change. Without the number, a call that the SDK repeats after a lost
    answer could roll back twice. Raises the errors of `promote`.
    """
    newest, *_ = promotion_history(name, service=service)
    expected = {"expected_number": newest.number}
    return _promotion(_send(service, "POST", f"{_address(name)}/rollback", options={"params": expected}))


def promotions(*, service: Service | None = None) -> list[Promotion]:
    """Return the current promotion of each of your names, sorted by name. Raises NotOffered."""
    return [_promotion(listed) for listed in _send(service, "GET", PROMOTIONS)["promotions"]]


def promotion_history(name: str, *, service: Service | None = None) -> list[Promotion]:
    """Return the promotions of a name, newest first. Raises the errors of `promote`."""
    return [_promotion(listed) for listed in _send(service, "GET", _address(name))["promotions"]]


def remove_promotion(name: str, *, service: Service | None = None) -> None:
    """Remove the name. The sampler is kept. Raises the errors of `promote`."""
    _send(service, "DELETE", _address(name))


def sampler_of_run(directory: Path) -> str:
    """Return the path of the last sampler of a finished `tinsmith train` run.

    Raises PromotionRefused for a directory without a finished run.
    """
    summary = directory / RUN_SUMMARY
    try:
        sampler = json.loads(summary.read_text())["sampler"]
    except FileNotFoundError as error:
        raise PromotionRefused(
            f"{directory} has no {RUN_SUMMARY}: `tinsmith train` writes it when the run is finished"
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PromotionRefused(f"{summary} has no readable sampler: {error!r}") from error
    if not isinstance(sampler, str) or not sampler:
        raise PromotionRefused(f"{summary} has no sampler: its `sampler` is {sampler!r}")
    return sampler


def _address(name: str) -> str:
    if "/" in name or name in ("", ".", ".."):
        raise PromotionRefused(f"{name!r} is not a valid name: it may not be empty, '.' or '..', or contain '/'")
    return f"{PROMOTIONS}/{quote(name, safe='')}"


def _promotion(answer: Mapping[str, Any]) -> Promotion:
    time = datetime.fromisoformat(answer["time"])
    return Promotion(answer["name"], answer["model_path"], time, answer["number"], answer["is_rollback"])


def _send(
    service: Service | None, method: str, address: str, body: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    return send(service, method, address, body, explain=explained, **more)


def explained(status: int, body: object) -> TrainingError | None:
    """Return the error for a refusal. For a refusal that is not about promotions, return None."""
    return refusal(
        status,
        body,
        refused=PromotionRefused,
        not_offered="this server has no stable names for samplers: use the sampler's path instead",
    )


OTHER_COLUMNS_WIDTH = 60
"""The width of the other columns, including the headers."""
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
    as_json: AsJson = False,
    base_url: BaseUrl = None,
) -> None:
    """Give a saved sampler a stable name on the OpenAI endpoint, change the sampler of a name, or roll a name back."""
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
            _print_promotion(rollback(str(name), service=service), as_json)
        else:
            _print_promotion(promote(str(name), str(path), expected=_expected(expect), service=service), as_json)
            if not as_json:
                _print_usage(str(name), base_url)
    except (TrainingError, tinker.TinkerError) as error:
        fail("promote", str(error))


def _expected(expect: str | None) -> str | Expected | None:
    return Expected.ANYTHING if expect is None else expect or None


def _print_promotion(promotion: Promotion, as_json: bool) -> None:
    print(json.dumps(_described(promotion)) if as_json else f"{promotion.name} stands for {promotion.path}")


def _print_usage(name: str, base_url: str) -> None:
    print(f"Talk to it: tinsmith chat {name}")
    print(f"OpenAI clients: base URL {base_url.rstrip('/')}/v1, model {name}")


def _show(found: Sequence[Promotion], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"promotions": [_described(promotion) for promotion in found]}))
        return
    table = Table("name", "since", "by", Column("stands for", no_wrap=True), box=None, pad_edge=False)
    for promotion in found:
        by = "rollback" if promotion.is_rollback else "promotion"
        table.add_row(promotion.name, f"{promotion.time:%Y-%m-%d %H:%M:%S}", by, promotion.path)
    # A path must stay on one line, so that it can be copied. The terminal wraps it, not the table.
    width = OTHER_COLUMNS_WIDTH + max((len(promotion.name) + len(promotion.path) for promotion in found), default=0)
    make_console(width=width).print(table)


def _described(promotion: Promotion) -> dict[str, Any]:
    return {
        "name": promotion.name,
        "path": promotion.path,
        "time": promotion.time.isoformat(),
        "number": promotion.number,
        "is_rollback": promotion.is_rollback,
    }
