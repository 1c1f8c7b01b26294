"""The settings of a run. Settings come from a file and from flags."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tinsmith.training.errors import BadConfig

LogTarget = Literal["console", "tensorboard", "wandb", "trackio"]
Positive = Annotated[int, Field(ge=1)]
NotNegative = Annotated[int, Field(ge=0)]


def _words(value: Any) -> Any:
    """Split the value `a,b` of a flag into a list. A value from a file is already a list."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


class RunConfig(BaseModel):
    """The settings of every kind of run. Paths are relative to the working directory."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: ClassVar[str]

    model: str = Field(description="Base model, by its name on the server.")
    out: Path = Field(Path("run"), description="Folder of this run: checkpoints, metrics, curves and the adapter.")
    seed: int = Field(0, description="Seed for the adapter's initial weights, the order of the data, and samples.")
    rank: Positive = Field(32, description="Rank of the adapter.")
    tokenizer: str | None = Field(
        None, description="Folder or hub id of the tokenizer; by default it is found by the model's name."
    )
    renderer: str = Field(
        "auto",
        description="Conversion of conversations to tokens: a tinker-cookbook renderer, chat_template, plain, "
        "or auto: the cookbook's for models that it knows, else the tokenizer's chat template, else plain text.",
    )
    learning_rate: float = Field(5e-4, gt=0, description="Peak learning rate of the schedule.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear", description="Learning rate after the warm-up; linear and cosine end at 0."
    )
    warmup_steps: NotNegative = Field(0, description="Steps in which the learning rate rises from 0.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Adam: decay rate of the first moment.")
    adam_beta2: float = Field(0.95, ge=0, lt=1, description="Adam: decay rate of the second moment.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam: term in the denominator for numerical stability.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    grad_clip_norm: float = Field(0.0, ge=0, description="Largest norm of the gradients; 0 turns clipping off.")
    eval_every: NotNegative = Field(
        20, description="Steps between evaluations; 0 evaluates only before the first and after the last."
    )
    save_every: Positive = Field(
        20, description="Steps between checkpoints. A run that was killed resumes from the newest."
    )
    keep_last: Positive = Field(2, description="Number of checkpoints to keep.")
    logs: Annotated[tuple[LogTarget, ...], BeforeValidator(_words)] = Field(
        ("console",),
        description="Where metrics go in addition to OUT/metrics.jsonl: console, tensorboard, wandb, trackio.",
    )
    project: str | None = Field(None, description="Project in W&B and trackio.")
    name: str | None = Field(None, description="Name of the run in W&B and trackio.")


class DataConfig(RunConfig):
    """The settings of runs that train on a file of examples."""

    data: Path = Field(description="Training data: JSONL, one example per line.")
    eval_data: Path | None = Field(
        None, description="Evaluation data: JSONL; by default a fraction of data is held out."
    )
    eval_fraction: float = Field(0.1, ge=0, lt=1, description="Fraction of data to hold out if there is no eval_data.")
    eval_examples: Positive = Field(100, description="Largest number of examples to hold out.")
    batch_size: Positive = Field(8, description="Examples per optimizer step.")
    epochs: Positive = Field(3, description="Number of passes over the data.")
    max_steps: Positive | None = Field(
        None, description="Largest number of optimizer steps; by default all epochs run."
    )
    max_length: Annotated[int, Field(ge=2)] = Field(2048, description="Longest example, in tokens.")
    too_long: Literal["drop", "truncate", "refuse"] = Field("drop", description="Treatment of longer examples.")


class SftConfig(DataConfig):
    """Supervised fine-tuning."""

    kind: ClassVar[str] = "sft"

    train_on: Literal["all_assistant", "last_assistant"] = Field(
        "all_assistant", description="Messages of a conversation that the model is trained on."
    )


class DpoConfig(DataConfig):
    """Direct preference optimization, with the initial model as the reference."""

    kind: ClassVar[str] = "dpo"

    learning_rate: float = Field(1e-4, gt=0, description="Peak learning rate of the schedule.")
    beta: float = Field(0.1, gt=0, description="Penalty for moving away from the reference model.")


class RlConfig(RunConfig):
    """Reinforcement learning, on-policy. The run uses a file of prompts, or your own environment."""

    kind: ClassVar[str] = "rl"

    environment: str = Field(
        description="jsonl (prompts with answers for a grader) or module:function. The function is called with "
        "renderer, group_size, count and seed, and returns tinker-cookbook's EnvGroupBuilders. The module is found "
        "in the current directory or among the installed packages.",
    )
    data: Path | None = Field(None, description='Data of environment jsonl: {"prompt": …, "answer": …} per line.')
    eval_data: Path | None = Field(
        None, description="Evaluation data of environment jsonl; by default eval_groups lines of data."
    )
    grader: str = Field(
        "exact",
        description="Grader of environment jsonl: exact, contains, number (the last number in the answer), or "
        "module:function, which is called with the sampled text and the answer and returns the reward.",
    )
    renderer: str = Field(
        "auto",
        description="Conversion of conversations to tokens: a tinker-cookbook renderer, auto (the cookbook's "
        "for models that it knows, else role_colon), or none, which gives the environment tokens instead of text.",
    )
    steps: Positive = Field(30, description="Optimizer steps.")
    groups: Positive = Field(64, description="Number of different training groups; not used with environment jsonl.")
    groups_per_step: Positive = Field(8, description="Groups per optimizer step.")
    group_size: Annotated[int, Field(ge=2)] = Field(
        8, description="Answers per group, which are compared with each other."
    )
    eval_groups: NotNegative = Field(16, description="Number of groups to hold out.")
    max_tokens: Positive = Field(64, description="Longest answer, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature of the answers.")
    loss: Literal["importance_sampling", "ppo", "cispo"] = Field(
        "importance_sampling", description="Loss of the policy gradient."
    )


Config = TypeVar("Config", bound=RunConfig)

MAY_CHANGE = frozenset({"logs", "project", "name", "eval_every", "save_every", "keep_last", "out", "data", "eval_data"})
"""The settings that may change when a run is resumed. Another function compares the content of data files."""
CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"
SUMMARY = "summary.json"


def load_config(kind: type[Config], file: Path | None, flags: Mapping[str, str]) -> Config:
    """Return the settings in the file.

    Flags override the settings in the file. Raises BadConfig with a line for each mistake.
    """
    fields = {**({} if file is None else _read(file)), **flags}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        lines = [_sentence(kind, dict(mistake)) for mistake in error.errors()]
        raise BadConfig("\n".join(lines)) from error


def to_yaml(config: RunConfig) -> str:
    """Return all settings, including defaults, in the format of a `--config` file."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def require_same(config: RunConfig, written: str, where: Path) -> None:
    """Raise BadConfig if the settings differ from the settings at the start of the run."""
    before: dict[str, Any] = yaml.safe_load(written)
    now = config.model_dump(mode="json")
    differing = [name for name in now if name not in MAY_CHANGE and now[name] != before.get(name)]
    if before.keys() - now.keys():
        raise BadConfig(f"{where} is from another kind of run than {config.kind}: choose another out")
    if differing:
        changes = ", ".join(f"{name} was {before.get(name)!r} and is {now[name]!r}" for name in differing)
        raise BadConfig(
            f"{where} has the settings of this run, but {changes}: use the same value, or choose another out"
        )


def _read(file: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except OSError as error:
        raise BadConfig(f"{file} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise BadConfig(f"{file} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise BadConfig(f"{file} has no settings: write lines like `model: demo/tiny`")
    return content


def _sentence(kind: type[RunConfig], mistake: dict[str, Any]) -> str:
    name = ".".join(str(part) for part in mistake["loc"])
    if mistake["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, kind.model_fields, n=1)
        return f"{name} is not a setting of {kind.kind}" + (f"; did you mean {near[0]}?" if near else "")
    if mistake["type"] == "missing":
        return f"{name} is required: {kind.model_fields[name].description} Set it in the file, or use --{name}"
    message = mistake["msg"][:1].lower() + mistake["msg"][1:]
    return f"{name} is {mistake['input']!r}: {message}"
