"""`tinsmith eval`: evaluate checkpoints, and compare runs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tinker
import typer
from rich.progress import Progress
from rich.table import Column, Table
from tinker import types
from typer.core import TyperGroup
from typing_extensions import override

from tinsmith.console import AsJson, BaseUrl, fail, make_console, print_error
from tinsmith.credentials import BASE_URL_VARIABLE, api_key_from_environment, base_url_from_environment
from tinsmith.files import make_output_folder
from tinsmith.training.errors import TrainingError
from tinsmith.training.evaluation.comparison import Compared, compare, csv_of_comparison, read_runs
from tinsmith.training.evaluation.examples import DEFAULT_CONCURRENCY, DEFAULT_MAX_TOKENS, DEFAULT_SEED, GRADER_NAMES
from tinsmith.training.evaluation.intervals import Estimate
from tinsmith.training.evaluation.sources import Checkpoint, at_path, in_root, of_base_model, of_run
from tinsmith.training.evaluation.summary import Summary, draw_curves, shown

if TYPE_CHECKING:
    from tinsmith.training.evaluation.offline import Sweep

RUN = "run"
PICTURE_FILE, TABLE_FILE = "comparison.png", "comparison.csv"


class _RunByDefault(TyperGroup):
    """A group of commands in which `tinsmith eval TASK…` means `tinsmith eval run TASK…`."""

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args[:1] and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named or not args else [RUN, *args])


evaluate = typer.Typer(
    cls=_RunByDefault,
    help="Evaluate checkpoints on your own tasks, and compare runs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


@dataclass(frozen=True, slots=True)
class _Server:
    base_url: str
    api_key: str | None

    def session(self, name: str) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.base_url, api_key=self.api_key, display_name=name)

    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.base_url, api_key=self.api_key)


@evaluate.command(RUN)
def run(
    tasks: Annotated[
        list[str], typer.Argument(metavar="TASK…", help="Files of examples (.jsonl), or tasks as module:name.")
    ],
    *,
    checkpoints: Annotated[list[str], typer.Option(help="A run's checkpoints: a directory or an fsspec URL.")] = [],  # noqa: B006
    path: Annotated[list[str], typer.Option(help="A tinker:// path of a sampler or a state.")] = [],  # noqa: B006
    run_id: Annotated[list[str], typer.Option("--run", help="All checkpoints of this run on the server.")] = [],  # noqa: B006
    model: Annotated[list[str], typer.Option(help="A base model, without an adapter.")] = [],  # noqa: B006
    grader: Annotated[
        str | None, typer.Option(help=f"Grader for files of examples: {', '.join(GRADER_NAMES)}.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float, typer.Option(min=0, help="Sampling temperature; 0 always takes the most probable token.")
    ] = 0.0,
    num_samples: Annotated[int, typer.Option(min=1, help="Answers sampled for each example.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = DEFAULT_SEED,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Use only this many examples of each file, from its start.")
    ] = None,
    renderer: Annotated[
        str | None, typer.Option(help="A tinker-cookbook renderer, or raw; default: the chat template.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder or hub name; default: the base model's.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Examples evaluated at the same time.")] = DEFAULT_CONCURRENCY,
    out: Annotated[
        Path, typer.Option(help="Folder for results.jsonl, results.csv and curves.png; existing results are reused.")
    ] = Path("evaluation"),
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate checkpoints. The command `run` is the default.

    After a kill, the same command resumes the evaluation, and repeats no samples.
    """
    # Imported here so that help does not load the cookbook.
    from tinsmith.training.evaluation.loading import TaskOptions, find_tasks

    if not (checkpoints or path or run_id or model):
        raise typer.BadParameter("use --checkpoints, --path, --run or --model to say what to evaluate")
    server = _Server(base_url or base_url_from_environment(), api_key_from_environment())
    # Tasks ask the same server for the tokenizer.
    os.environ[BASE_URL_VARIABLE] = server.base_url
    with _errors_as_sentences():
        options = TaskOptions(
            grader=grader,
            params=types.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
            num_samples=num_samples,
            limit=limit,
            renderer=renderer,
            tokenizer=_tokenizer(tokenizer),
        )
        found = [task for name in tasks for task in find_tasks(name, options)]
        chosen = [
            *map(of_base_model, model),
            *(checkpoint for root in checkpoints for checkpoint in in_root(root)),
            *(checkpoint for server_run in run_id for checkpoint in of_run(server.rest(), server_run)),
            *map(at_path, path),
        ]
        sweep = _swept(found, chosen, server, out, concurrency)
    _report(sweep, out, as_json=as_json)
    if sweep.failures or not sweep.summaries:
        raise typer.Exit(1)


@evaluate.command("compare")
def compare_(
    directories: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="Folders of evaluations; the others are compared with the first."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Also write comparison.csv and comparison.png to this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare evaluations: paired differences from the first, for the same steps and examples."""
    with _errors_as_sentences():
        runs = read_runs(directories)
        compared = compare(runs)
    if out is not None:
        make_output_folder(out, "--out")
        (out / TABLE_FILE).write_text(csv_of_comparison(compared))
        draw_curves({name: results.summaries for name, results in runs.items()}, out / PICTURE_FILE)
    if as_json:
        print(json.dumps([_compared(row) for row in compared]))
        return
    table = Table(
        "metric", "step", "run", "mean [95 %]", "examples", Column("from the first", overflow="fold"), **_PLAIN
    )
    for row in compared:
        text = shown(row.difference) if row.difference else row.reason
        table.add_row(row.summary.name, _step(row.summary), row.run, *_estimate(row.summary), text)
    _print(table)


_PLAIN: dict[str, Any] = {"box": None, "pad_edge": False}


def _swept(tasks: Sequence[Any], chosen: Sequence[Checkpoint], server: _Server, out: Path, concurrency: int) -> Sweep:
    from tinsmith.training.evaluation.offline import OfflineEvaluator

    console = make_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        connect = partial(server.session, f"evaluation in {out}")
        evaluator = OfflineEvaluator(tasks, out, connect=connect, concurrency=concurrency, progress=progress)
        return evaluator.run(chosen)


def _report(sweep: Sweep, out: Path, *, as_json: bool) -> None:
    if as_json:
        content = {"summaries": [_described(summary) for summary in sweep.summaries], "gone": sweep.gone}
        print(json.dumps(content | {"failures": sweep.failures, "directory": str(out)}))
        return
    table = Table("checkpoint", "step", "metric", "mean [95 %]", "examples", **_PLAIN)
    for summary in sweep.summaries:
        table.add_row(summary.label, _step(summary), summary.name, *_estimate(summary))
    _print(table)
    for reason in sweep.gone.values():
        _warn(f"skipped: {reason}")
    for failure in sweep.failures:
        _warn(failure)
    if sweep.failures:
        _warn("run the same command again to retry what failed")


def _tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"there is no tokenizer {name}: {error}") from error


def _described(summary: Summary) -> dict[str, Any]:
    place = {
        "checkpoint": summary.checkpoint,
        "label": summary.label,
        "step": summary.step,
        "task": summary.task,
        "metric": summary.metric,
    }
    return place | _numbers(summary.estimate)


def _compared(row: Compared) -> dict[str, Any]:
    difference = _numbers(row.difference) if row.difference else None
    return {"run": row.run} | _described(row.summary) | {"difference": difference, "reason": row.reason}


def _numbers(found: Estimate) -> dict[str, Any]:
    bounds = {"mean": found.mean, "low": found.low, "high": found.high}
    # JSON has no NaN.
    return {name: None if math.isnan(bound) else bound for name, bound in bounds.items()} | {"examples": found.examples}


def _estimate(summary: Summary) -> tuple[str, str]:
    return shown(summary.estimate), str(summary.estimate.examples or "")


def _step(summary: Summary) -> str:
    return "" if summary.step is None else str(summary.step)


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    try:
        yield
    except (TrainingError, tinker.TinkerError, OSError) as error:
        fail("eval", str(error) or type(error).__name__)


def _print(table: Table) -> None:
    make_console().print(table)


def _warn(message: str) -> None:
    print_error(f"tinsmith eval: {message}")
