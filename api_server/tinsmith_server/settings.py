"""What can be set, where it comes from, and what is in force.

Flags win over the environment (`TINSMITH_...`), which wins over the file of `--config`, which
wins over the defaults here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict

from tinsmith_server.errors import StartupError

MIB = 2**20
DAY_SECONDS = 24 * 3600.0

Seconds = Annotated[float, Field(gt=0)]


class Settings(BaseSettings):
    """Everything `tinsmith serve` can be told. Every field does something."""

    model_config = SettingsConfigDict(env_prefix="TINSMITH_", extra="forbid", frozen=True)

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    public_url: str | None = Field(None, description="How clients reach this server, for download links.")
    data: Path = Field(Path("tinsmith-data"), description="Directory of everything the server must find again.")
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="NAME[=PATH]: a directory or a hub id, and the name it is advertised under."
    )
    api_key: SecretStr | None = Field(None, description="A static key of tenant `default`; starts with `tml-`.")
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: a SQLite file in the data directory.")
    checkpoint_root: str | None = Field(None, description="fsspec URL; default: a directory in the data directory.")

    session_timeout_seconds: Seconds = Field(900, description="A session silent for this long is finished.")
    poll_hold_seconds: Seconds = Field(25, le=40, description="How long a poll without result is held.")
    max_body_bytes: int = Field(256 * MIB, ge=MIB, description="Largest request body, also after decompression.")
    compress_training_bodies: bool = Field(False, description="Ask clients to send zstd; pays on slow networks.")

    engine: str = Field("peft", description="The worker's engine: `peft`, or `module:factory`.")
    adapter_slots: int = Field(8, ge=1, description="Adapters that one worker holds in memory.")
    max_rank: int = Field(64, ge=1, description="Highest LoRA rank.")
    lora_alpha: float = Field(32.0, gt=0, description="LoRA alpha, whatever the rank.")
    map_stable_reinforce: bool = Field(True, description="Run `stable_reinforce` as `cispo`, and say so.")
    deterministic_sampling: bool = Field(False, description="A sample does not depend on its company; slower.")

    ephemeral_retention_seconds: float = Field(
        3600, ge=0, description="How long unnamed sampler weights outlive their session."
    )
    ephemeral_per_tenant: int = Field(256, ge=1, description="Unnamed sampler weights kept per tenant.")
    autosave_ttl_seconds: float = Field(
        7 * DAY_SECONDS, ge=3600, description="How long the checkpoint of a reaped session is kept."
    )
    external_url_seconds: Seconds = Field(3600, description="How long a download link works.")

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"

    @field_validator("models", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("api_key")
    @classmethod
    def _has_the_prefix_that_the_sdk_insists_on(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith("tml-"):
            raise ValueError("must start with 'tml-': the tinker SDK refuses any other key before it sends a request")
        return value

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.data / 'tinsmith.db').absolute()}"

    @property
    def checkpoints_url(self) -> str:
        return self.checkpoint_root or (self.data / "checkpoints").absolute().as_uri()


def load_settings(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Merges flags (None means not given), environment, file and defaults. Raises StartupError naming the key."""
    from_file = read_config_file(config) if config is not None else {}
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return Settings(**{**from_file, **EnvSettingsSource(Settings)(), **given})
    except ValidationError as error:
        raise StartupError(_sentence(error)) from error


def read_config_file(path: Path) -> dict[str, Any]:
    """A mapping of setting names, as YAML or JSON. Raises StartupError for anything else in it."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise StartupError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"the configuration file {path} is neither YAML nor JSON: {error}") from error
    if not isinstance(content, dict | None):
        raise StartupError(f"the configuration file {path} must hold a mapping of setting names to values")
    unknown = sorted(str(key) for key in content or {} if key not in Settings.model_fields)
    if unknown:
        known = ", ".join(sorted(Settings.model_fields))
        raise StartupError(f"unknown setting {', '.join(unknown)} in {path}; there are: {known}")
    return content or {}


def describe_settings(settings: Settings) -> str:
    """What is in force, as YAML that `--config` accepts again but for its masked secrets."""
    values = settings.model_dump(mode="json")
    values["database_url"] = _without_password(settings.store_url)
    values["checkpoint_root"] = _without_password(settings.checkpoints_url)
    return yaml.safe_dump(values, sort_keys=False)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", url)


def _sentence(error: ValidationError) -> str:
    problems = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_input=False))
    return "settings do not fit: " + "; ".join(problems)
