"""`tinsmith checkpoints`: list, verify, prune and export the checkpoints of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tinker
import typer
from rich.table import Column, Table

from tinsmith.console import AsJson, BaseUrl, fail, make_console, print_error
from tinsmith.credentials import api_key_from_environment, base_url_from_environment
from tinsmith.training.checkpoints.metadata import CONFIG_FILE, TRAINER_STATE_FILE, Metadata
from tinsmith.training.checkpoints.retention import Retention
from tinsmith.training.checkpoints.server_states import ServerStates
from tinsmith.training.checkpoints.store import CheckpointStore, export_adapter, newest_step
from tinsmith.training.checkpoints.trainer_state import TrainerState, read_trainer_state
from tinsmith.training.errors import CheckpointDamaged, NoCheckpoint, TrainingError

checkpoints = typer.Typer(
    help="List, verify, prune and export the checkpoints of a run, and show how to resume it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

Root = Annotated[str, typer.Argument(metavar="ROOT", help="A run's checkpoints: a directory or an fsspec URL.")]
Step = Annotated[int, typer.Argument(metavar="STEP", min=0)]
NewestOr = Annotated[
    int | None,
    typer.Argument(metavar="[STEP]", min=0, help="Step of the checkpoint; default: the newest complete one."),
]
AllOr = Annotated[int | None, typer.Argument(metavar="[STEP]", min=0, help="Step of the checkpoint; default: all.")]


@checkpoints.command("list")
def list_(root: Root, as_json: AsJson = False) -> None:
    """List steps, ages, sizes and metrics."""
    with errors_as_sentences():
        store = CheckpointStore(root)
        found = store.readable()
        damaged = sorted(set(store.steps()) - {metadata.step for metadata in found})
    if as_json:
        print(json.dumps({"checkpoints": [_described(metadata) for metadata in found], "damaged": damaged}))
        return
    if not (found or damaged):
        _warn(_none_in(store))
        return
    table = Table("step", "saved", "MB", "metrics", box=None, pad_edge=False)
    for metadata in found:
        megabytes = f"{metadata.size_bytes / 1e6:.1f}"
        table.add_row(str(metadata.step), _when(metadata), megabytes, _scores(metadata.metrics))
    _print(table)
    for step in damaged:
        _warn(f"step {step} is damaged; run `tinsmith checkpoints verify` for details")


@checkpoints.command()
def show(root: Root, step: Step, as_json: AsJson = False) -> None:
    """Show one checkpoint: its files, the position of the training loop, and its config."""
    with errors_as_sentences():
        store = CheckpointStore(root)
        metadata, state = store.metadata(step), _trainer_state(store, step)
        with store.open(step, CONFIG_FILE) as stream:
            config = stream.read().decode()
    if as_json:
        print(json.dumps(_described(metadata) | {"loop_state": state.loop_state, "config": config}, default=str))
        return
    table = Table("", Column(overflow="fold"), box=None, pad_edge=False, show_header=False)
    for word, text in (
        ("saved", _when(metadata)),
        ("base model", metadata.base_model),
        ("state", metadata.state_path),
        ("loop state", str(dict(state.loop_state))),
        ("metrics", _scores(metadata.metrics)),
        *((name, f"{file.size_bytes} bytes, sha256 {file.sha256[:12]}…") for name, file in metadata.files.items()),
        ("config", config.rstrip()),
    ):
        table.add_row(word, text)
    _print(table)


@checkpoints.command()
def verify(root: Root, step: AllOr = None, as_json: AsJson = False) -> None:
    """Read every file of the checkpoints, and compare the digests.

    The exit status is 1 if a checkpoint is damaged or if no checkpoint exists.
    """
    with errors_as_sentences():
        store = CheckpointStore(root)
        steps = store.steps() if step is None else [step]
        if not steps:
            raise NoCheckpoint(_none_in(store))
        damage = {checked: _damage(store, checked) for checked in steps}
        leftovers = store.leftovers()
    if as_json:
        listed = [{"step": checked, "whole": reason is None, "reason": reason} for checked, reason in damage.items()]
        print(json.dumps({"checkpoints": listed, "leftovers": leftovers}))
    else:
        table = Table("step", Column(overflow="fold"), box=None, pad_edge=False)
        for checked, reason in damage.items():
            table.add_row(str(checked), reason or "whole")
        _print(table)
        for name in leftovers:
            _warn(f"{name} is incomplete; the next save to {store.url} removes it")
    if any(damage.values()):
        raise typer.Exit(1)


@checkpoints.command()
def prune(
    root: Root,
    *,
    keep_last: Annotated[int, typer.Option(min=1, help="Keep this many of the newest checkpoints.")],
    keep_best: Annotated[int, typer.Option(min=0, help="Also keep this many of the best by --metric.")] = 0,
    metric: Annotated[str | None, typer.Option(help="Metric that --keep-best compares.")] = None,
    mode: Annotated[
        Literal["min", "max"], typer.Option(help="Keep checkpoints with a small (min) or large (max) metric.")
    ] = "min",
    keep_every: Annotated[
        int | None, typer.Option(min=1, help="Also keep every step that is a multiple of this.")
    ] = None,
    delete_states: Annotated[
        bool, typer.Option("--delete-states", help="Also delete their states on the server.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing.")
    ] = False,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Remove the checkpoints that no rule selects to keep."""
    with errors_as_sentences():
        store = CheckpointStore(root)
        removable = store.removable(Retention(keep_last, keep_best, metric, mode, keep_every))
        delete_state = _server(base_url).delete if delete_states and not dry_run else _leave_state
        for metadata in [] if dry_run else removable:
            store.remove(metadata.step, partial(delete_state, metadata.state_path))
    if as_json:
        print(json.dumps({"removed": [metadata.step for metadata in removable], "dry_run": dry_run}))
        return
    for metadata in removable:
        print(f"{'would remove' if dry_run else 'removed'} {store.address(metadata.step)}")
        if not (delete_states or dry_run):
            _warn(f"its state stays on the server: {metadata.state_path}")


@checkpoints.command()
def export(
    root: Root,
    to: Annotated[Path, typer.Option(help="Folder to create.")],
    step: NewestOr = None,
    as_json: AsJson = False,
) -> None:
    """Export a checkpoint as a PEFT adapter, without a server."""
    with errors_as_sentences():
        store = CheckpointStore(root)
        chosen = newest_step(store) if step is None else step
        files = export_adapter(store, chosen, to)
    if as_json:
        print(json.dumps({"step": chosen, "folder": str(to), "files": files}))
    else:
        print(f"step {chosen}: {to} ({', '.join(files)})")


@checkpoints.command()
def resume(
    root: Root,
    step: NewestOr = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the server.")] = False,
    base_url: BaseUrl = None,
    as_json: AsJson = False,
) -> None:
    """Show from which checkpoint a run resumes, whether the server has the state, and the code that resumes the run."""
    with errors_as_sentences():
        store = CheckpointStore(root)
        chosen = newest_step(store) if step is None else store.verify(step).step
        state = _trainer_state(store, chosen)
        if not offline:
            _server(base_url).require(state.state_path)
    facts = {"step": chosen, "checkpoint": store.address(chosen), "state_path": state.state_path, "asked": not offline}
    if as_json:
        print(json.dumps(facts | {"loop_state": state.loop_state}, default=str))
        return
    print(f"step {chosen}, {dict(state.loop_state)}, from {store.address(chosen)}")
    print("the server was not contacted" if offline else f"the server has {state.state_path}")
    print(f"\nmanager = CheckpointManager({root!r}, service, config=config)")
    print(f"resumed = manager.resume({'' if step is None else step})")


@contextmanager
def errors_as_sentences() -> Iterator[None]:
    """Print an error and exit. The status is 2 for invalid rules, and 1 for other errors."""
    try:
        yield
    except ValueError as error:
        _warn(str(error))
        raise typer.Exit(2) from error
    except (TrainingError, tinker.TinkerError, OSError, ImportError) as error:
        fail("checkpoints", str(error) or type(error).__name__)


def _none_in(store: CheckpointStore) -> str:
    return f"there are no checkpoints in {store.url}"


def _damage(store: CheckpointStore, step: int) -> str | None:
    try:
        store.verify(step)
    except CheckpointDamaged as error:
        return str(error)
    return None


def _trainer_state(store: CheckpointStore, step: int) -> TrainerState:
    with store.open(step, TRAINER_STATE_FILE) as stream:
        return read_trainer_state(stream.read())


def _server(base_url: str | None) -> ServerStates:
    return ServerStates(
        tinker.RestClient(base_url=base_url or base_url_from_environment(), api_key=api_key_from_environment())
    )


def _leave_state(state_path: str) -> None:
    """Do not delete the state on the server, because another program may use the state."""


def _described(metadata: Metadata) -> dict[str, Any]:
    return {
        "step": metadata.step,
        "created_at": metadata.created_at.isoformat(),
        "base_model": metadata.base_model,
        "state_path": metadata.state_path,
        "metrics": {name: value if math.isfinite(value) else str(value) for name, value in metadata.metrics.items()},
        "size_bytes": metadata.size_bytes,
        "files": {name: file.sha256 for name, file in metadata.files.items()},
    }


def _when(metadata: Metadata) -> str:
    return metadata.created_at.strftime("%Y-%m-%d %H:%M:%S")


def _scores(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())


def _print(table: Table) -> None:
    make_console().print(table)


def _warn(message: str) -> None:
    print_error(f"tinsmith checkpoints: {message}")
