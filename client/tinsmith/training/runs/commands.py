"""`tinsmith train`: train an adapter on examples or in an environment, and evaluate it."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tinsmith.console import fail, make_console, print_error
from tinsmith.files import make_output_folder
from tinsmith.training.errors import TrainingError
from tinsmith.training.runs.config import (
    CHECKPOINTS,
    CONFIG_FILE,
    DataConfig,
    DpoConfig,
    RlConfig,
    RunConfig,
    SftConfig,
    load_config,
)

if TYPE_CHECKING:
    from tinsmith.training.runs.objective import OnStart, RunStart
    from tinsmith.training.runs.outcome import Outcome

train = typer.Typer(
    help="Train an adapter on examples or in an environment, without a program: settings in YAML, overridden by flags.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

INTERRUPTED = 130
EXAMPLES = "examples"
RUN_FILE = "run.yaml"


def _run(config: RunConfig) -> None:
    """Run the training.

    Large packages are imported inside this function, so that help and errors in settings appear fast.
    """
    import tinker

    from tinsmith.training.runs.loop import Stopped

    console = make_console()
    try:
        outcome = _outcome(config, lambda start: console.print("\n".join(heading(config, start))))
    except Stopped as stopped:
        _warn(config.kind, str(stopped))
        raise typer.Exit(INTERRUPTED) from stopped
    except KeyboardInterrupt:
        _warn(config.kind, f"interrupted{_how_to_resume(config, '; no checkpoint was saved')}")
        raise typer.Exit(INTERRUPTED) from None
    except tinker.TinkerError as error:
        fail(f"train {config.kind}", f"server error: {error}{_how_to_resume(config, '')}")
    if outcome.after:
        console.print(outcome.table())
    for word, place in (
        ("adapter", outcome.adapter),
        ("curves", outcome.curves),
        ("summary", config.out / "summary.json"),
        ("sampler", outcome.sampler),
    ):
        console.print(f"{word:<8} {place}")


def heading(config: RunConfig, start: RunStart) -> list[str]:
    """Return the lines that describe a run. The lines are shown before training begins.

    The file `config.yaml` contains all settings.
    """
    counted = start.counted
    if isinstance(config, DataConfig):
        data = f"{config.data}: {counted['examples']} examples, {counted['held_out']} held out"
        lost = [f"{counted[word]} {word}" for word in ("dropped", "truncated") if counted[word]]
        data += f"; {' and '.join(lost)} for max_length {config.max_length}" if lost else ""
    else:
        assert isinstance(config, RlConfig)
        data = f"{config.environment}: {counted['groups']} groups, {counted['held_out']} held out"
    return [
        f"model    {config.model}, rank {config.rank}, learning rate {config.learning_rate:g}",
        f"data     {data}",
        f"steps    {start.steps}{_progress(start)}",
        f"output   {config.out}, all settings in {config.out / CONFIG_FILE}",
    ]


def _progress(start: RunStart) -> str:
    if start.done >= start.steps:
        return ": this run is already finished; another --out begins a new one"
    return f", resumed after step {start.done}" if start.done else ""


def _how_to_resume(config: RunConfig, otherwise: str) -> str:
    """Return the end of the message about a failed run.

    If a checkpoint exists, the text names the step from which the run resumes.
    """
    from tinsmith.training.checkpoints.store import CheckpointStore

    steps = CheckpointStore(str(config.out / CHECKPOINTS)).steps()
    return f"; the same command resumes it from the checkpoint of step {max(steps)}" if steps else otherwise


def _outcome(config: RunConfig, on_start: OnStart) -> Outcome:
    from tinsmith.training.runs.dpo import DPO
    from tinsmith.training.runs.loop import run
    from tinsmith.training.runs.rl import run_rl
    from tinsmith.training.runs.sft import SFT

    if isinstance(config, SftConfig):
        return run(SFT, config, on_start)
    if isinstance(config, DpoConfig):
        return run(DPO, config, on_start)
    assert isinstance(config, RlConfig)
    return run_rl(config, on_start)


def _command(kind: type[RunConfig]) -> Callable[..., None]:
    """Return a command with a flag for each setting. The flags and the settings file are checked together."""

    def command(config: Path | None, example: Path | None, **flags: str | None) -> None:
        try:
            if example is not None:
                _copy_example(kind.kind, example)
                return
            _run(load_config(kind, config, {name: value for name, value in flags.items() if value is not None}))
        except TrainingError as error:
            fail(f"train {kind.kind}", str(error))

    command.__doc__ = f"{(kind.__doc__ or '').rstrip('.')}, with settings from a file, overridden by flags."
    options = [
        _parameter("config", Path, typer.Option("--config", help="YAML file with any of the settings below.")),
        _parameter(
            "example",
            Path,
            typer.Option(
                "--example",
                metavar="FOLDER",
                help="Write example settings and data to this folder; a demo model learns them in a minute.",
            ),
        ),
    ]
    settings = [_setting(name, field) for name, field in kind.model_fields.items()]
    command.__signature__ = inspect.Signature([*options, *settings])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in [*options, *settings]}
    return command


def _setting(name: str, field: FieldInfo) -> inspect.Parameter:
    default = "" if field.default in (PydanticUndefined, None) else f" [default: {_shown(field.default)}]"
    text = f"{field.description or ''}{default}".strip().replace("[", "\\[")
    option = typer.Option(f"--{name.replace('_', '-')}", metavar=_metavar(field), help=text, rich_help_panel="Settings")
    return _parameter(name, str, option)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _shown(default: Any) -> str:
    return ",".join(default) if isinstance(default, tuple) else str(default)


def _metavar(field: FieldInfo) -> str:
    annotation = field.annotation
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    names = {int: "NUMBER", float: "NUMBER", Path: "PATH"}
    members = [annotation, *get_args(annotation)]
    return next((names[member] for member in members if member in names), "TEXT")


def _copy_example(kind: str, folder: Path) -> None:
    source = find_examples() / kind
    make_output_folder(folder, "--example")
    files = sorted(file for file in source.iterdir() if file.is_file())
    existing = [file.name for file in files if (folder / file.name).exists()]
    if existing:
        raise TrainingError(f"{folder / existing[0]} exists already")
    for file in files:
        shutil.copy(file, folder / file.name)
    print(f"Wrote {', '.join(file.name for file in files)}. To train, in {folder}:")
    print(f"  tinsmith train {kind} --config {RUN_FILE}")


def find_examples() -> Path:
    """Return the path of `examples/train`.

    In a wheel, the folder is next to this package; otherwise, in the checkout.
    """
    package = Path(__file__).parents[2]
    installed = package / EXAMPLES / "train"
    return installed if installed.exists() else package.parents[1] / EXAMPLES / "train"


def _warn(kind: str, message: str) -> None:
    print_error(f"tinsmith train {kind}: {message}")


for _kind in (SftConfig, DpoConfig, RlConfig):
    train.command(_kind.kind)(_command(_kind))
