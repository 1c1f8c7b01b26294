"""What can be set, and what it is by default. `configuration.py` has where it comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

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
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="`json` or `console`; `auto` is `console` on a terminal, else `json`."
    )

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
