"""What can be set, and what it is by default. `configuration.py` has where it comes from."""

from __future__ import annotations

import ipaddress
import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from typing_extensions import override

MIB = 2**20
GIB = 2**30
TIB = 2**40
DAY_SECONDS = 24 * 3600.0
EVERY_NAMESPACE = "*"
NAMESPACE_PATTERN = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"

CPU = "cpu"
# A GPU as CUDA_VISIBLE_DEVICES takes it: its index, or the UUID of a GPU or of a MIG slice.
GPU_PATTERN = r"0|[1-9][0-9]*|(GPU|MIG)-[\w/-]+"

OF_LOCAL_WORKERS = (
    "models",
    "devices",
    "preload_models",
    "engine",
    "engine_flags",
    "quantization",
    "adapter_slots",
    "model_places",
    "max_rank",
    "deterministic_sampling",
    "sampler",
    "sampler_environment",
    "sampler_flags",
)

Seconds = Annotated[float, Field(gt=0)]


def is_loopback(host: str) -> bool:
    """An address of this machine that no other can reach, also as IPv6 writes those of IPv4; or a name of it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Settings(BaseSettings):
    """Everything `tinsmith serve` can be told. Every field does something."""

    model_config = SettingsConfigDict(env_prefix="TINSMITH_", extra="forbid", frozen=True)

    @classmethod
    @override
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave out files of variables and of secrets: none is named, and to look for each setting there takes time."""
        return init_settings, env_settings

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Another port, which serves /metrics without a key and nothing else; for Prometheus.",
    )
    pages_need_key: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether /docs, /openapi.json and, at the main port, /metrics need a key; `auto`: unless "
        "only this machine can reach the server, and it is what asks.",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are believed.",
    )
    connections_per_address: int = Field(
        10_000,
        ge=1,
        description="Connections of one address, or requests in flight behind a trusted proxy; at most half of the "
        "files that the process may open.",
    )
    public_url: str | None = Field(None, description="How clients reach this server, for links to files.")
    data: Path = Field(Path("tinsmith-data"), description="Directory of everything the server must find again.")
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="NAME[=PATH]: a directory or a hub id, and the name it is advertised under."
    )
    devices: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="One worker of each model for each of these devices: GPUs by index or UUID, as in `0,1`, or `cpu`; "
        "default: one worker, on a GPU if there is one.",
    )
    preload_models: bool = Field(True, description="Load models at start, not when somebody first needs them.")
    fleet: Literal["local", "kubernetes"] = Field(
        "local",
        description="Where workers live: `local` processes of this server, or TrainingSessions in `kubernetes`.",
    )
    fleet_namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Namespaces of TrainingSessions and SamplerPools, or `*` for the whole cluster; "
        "default: that of the server's own pod.",
    )
    fleet_tls_directory: Path = Field(
        Path("/etc/tinsmith/tls"), description="Directory with tls.crt, tls.key and ca.crt, for workers in a cluster."
    )
    catalogue: Path | None = Field(
        None,
        description="JSON file of sessions that may be made when models wait: a list of {name, maxSessions, spec}.",
    )
    require_keys: bool = Field(
        True,
        description="Off: whoever is on this machine is tenant `default`, with any key or none, and nobody else is "
        "answered.",
    )
    api_key: SecretStr | None = Field(None, description="A static key of tenant `default`; starts with `tml-`.")
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: a SQLite file in the data directory.")
    checkpoint_root: str | None = Field(None, description="fsspec URL; default: a directory in the data directory.")

    session_timeout_seconds: Seconds = Field(
        900, description="A session silent for this long is finished; at least twice `poll_hold_seconds`."
    )
    poll_hold_seconds: Seconds = Field(25, le=40, description="How long a poll without result is held.")
    max_body_bytes: int = Field(
        64 * MIB, ge=MIB, description="Largest body of a training request, also after decompression."
    )
    max_sample_bytes: int = Field(8 * MIB, ge=MIB, description="Largest body of a sample: a token takes 2 to 7 bytes.")
    body_bytes_per_tenant: int = Field(
        256 * MIB,
        ge=MIB,
        description="Bytes of request bodies that a tenant may have in flight, and as many of results; more wait.",
    )
    body_bytes_in_all: int = Field(
        512 * MIB, ge=MIB, description="The same of all tenants together; each byte takes up to three of memory."
    )
    requests_per_minute: int = Field(
        0, ge=0, description="Requests of a key; polls, heartbeats and telemetry are free; 0: no limit."
    )
    trained_tokens_per_minute: int = Field(
        0, ge=0, description="Tokens of a key's forward and forward_backward; 0: no limit."
    )
    sampled_tokens_per_minute: int = Field(0, ge=0, description="Tokens that a key's samples came to; 0: no limit.")
    adapters_per_tenant: int = Field(1024, ge=1, description="Models that a tenant may hold, at work or waiting.")
    queued_operations_per_tenant: int = Field(10_000, ge=1, description="Operations of a tenant that may wait.")
    checkpoint_bytes_per_tenant: int = Field(
        4 * TIB, ge=1, description="Bytes of a tenant's checkpoints that have a name."
    )
    max_upload_bytes: int = Field(
        4 * GIB,
        ge=MIB,
        description="Largest file of an adapter that a client brings in; a worker reads it into memory.",
    )
    uploads_per_tenant: int = Field(8, ge=1, description="Adapters of a tenant that may be on their way in at a time.")
    samples_per_tenant: int = Field(
        32_768, ge=1, description="Samples of a tenant that may be in flight; more are held back."
    )
    token_exchange: bool = Field(
        False,
        description="Ask clients to exchange their key for tokens of an hour, so that it is seldom sent; "
        "`tinker auth whoami` needs it.",
    )
    compress_training_bodies: bool = Field(False, description="Ask clients to send zstd; pays on slow networks.")
    stream_saves: bool = Field(
        True,
        description="In a cluster: tell a pool's samplers which worker of their namespace has a save in memory, so "
        "that they need not read it from the checkpoint root. Off, they read it, which costs both less of a processor.",
    )
    session_poller: bool = Field(
        False,
        description="Ask clients to wait for all samples of a sampling client by one poll, not by one for each: fewer "
        "connections, and samples that are lost together with this server's memory are not noticed.",
    )

    engine: str = Field("peft", description="The worker's engine: `peft`, `nemo-rl`, `miles`, or `module:factory`.")
    engine_flags: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="More flags of the engine's worker, as on a command line: `--ranks 2`."
    )
    quantization: Literal["8bit", "4bit"] | None = Field(
        None, description="Keep the frozen weights of base models in so few bits; default: as wide as they are used."
    )
    sampler: Literal["builtin", "vllm", "sglang"] = Field(
        "builtin",
        description="What samples: `builtin`, in the worker's process, or a server of others', in one beside it.",
    )
    sampler_environment: Path | None = Field(
        None, description="Virtual environment in which vLLM or SGLang is installed; default: that of this server."
    )
    sampler_flags: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="More flags of that sampler, as on a command line: "
        "`--server-argument=--gpu-memory-utilization=0.5`.",
    )
    adapter_slots: int = Field(8, ge=1, description="Adapters that one worker, or sampler, holds in memory.")
    model_places: int | None = Field(
        None, ge=1, description="Models that one worker takes, in memory or parked; default: 8 for each adapter slot."
    )
    max_rank: int = Field(
        128,
        ge=1,
        description="Highest LoRA rank; recipes of the cookbook ask for 128. Each slot may take memory for it.",
    )
    places_for_others: int = Field(
        1,
        ge=0,
        description="The last places of a base model: tenants that have one already leave them to tenants that "
        "have none, while such a tenant has a session.",
    )
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
    external_url_seconds: Seconds = Field(3600, description="How long a link for downloads or uploads works.")

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe lines of the log; `tinsmith serve` on a terminal has `warning` by default."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="`json` or `console`; `auto` is `console` on a terminal, else `json`."
    )

    @field_validator("models", "devices", "fleet_namespaces", "trusted_proxies", mode="before")
    @classmethod
    def _split_at_commas(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return tuple(value) if isinstance(value, list) else value

    @field_validator("devices", mode="before")
    @classmethod
    def _may_be_numbers(cls, value: object) -> object:
        """A file may say `devices: [0, 1]`, or `devices: 0`."""
        if isinstance(value, int) and not isinstance(value, bool):
            return (str(value),)
        return tuple(map(str, value)) if isinstance(value, list) else value

    @field_validator("engine_flags", "sampler_flags", mode="before")
    @classmethod
    def _split_as_a_shell_does(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(shlex.split(value))
        return tuple(value) if isinstance(value, list) else value

    @field_validator("fleet_namespaces")
    @classmethod
    def _are_namespaces(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if EVERY_NAMESPACE in value and len(value) > 1:
            raise ValueError("`*` is the whole cluster; give it alone, or only the names")
        wrong = [name for name in value if name != EVERY_NAMESPACE and not re.fullmatch(NAMESPACE_PATTERN, name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no name of a namespace")
        return tuple(dict.fromkeys(value))

    @field_validator("trusted_proxies")
    @classmethod
    def _are_networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for network in value:
            ipaddress.ip_network(network, strict=False)
        return value

    @field_validator("api_key")
    @classmethod
    def _has_the_prefix_that_the_sdk_insists_on(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().startswith("tml-"):
            raise ValueError("must start with 'tml-': the tinker SDK refuses any other key before it sends a request")
        return value

    @model_validator(mode="after")
    def _belongs_to_the_fleet(self) -> Settings:
        """A setting that the chosen fleet does not read would do nothing, and not say so."""
        if self.fleet == "kubernetes":
            for name in OF_LOCAL_WORKERS:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: with fleet `kubernetes`, TrainingSessions say it; remove it")
            if self.checkpoint_root is None:
                raise ValueError(
                    "checkpoint_root: with fleet `kubernetes` it must be set to a place that workers share"
                )
        elif self.catalogue is not None or self.fleet_namespaces:
            raise ValueError("catalogue and fleet_namespaces are for fleet `kubernetes`; set it, or remove them")
        return self

    @model_validator(mode="after")
    def _is_for_this_machine_alone_without_keys(self) -> Settings:
        if not self.require_keys and (self.trusted_proxies or not self.listens_here_alone):
            raise ValueError(
                "require_keys: without keys the server is for this machine alone: it listens on 127.0.0.1 or another "
                "loopback address (setting host), and trusts no proxies; change that, or turn keys on"
            )
        return self

    @field_validator("devices")
    @classmethod
    def _are_devices(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # CUDA would take "00" for GPU 0 as well, so a device has one spelling.
        if wrong := [device for device in value if device != CPU and not re.fullmatch(GPU_PATTERN, device)]:
            raise ValueError(f"{wrong[0]!r} is no device; name GPUs by index or UUID, as in `0,1`, or `cpu`")
        if twice := [device for device in value if device != CPU and value.count(device) > 1]:
            raise ValueError(f"device {twice[0]} is named twice; two workers would share its memory, so name it once")
        return value

    @model_validator(mode="after")
    def _has_engines_for_single_devices(self) -> Settings:
        if self.devices and self.engine != "peft":
            raise ValueError(
                f"devices: a worker of {self.engine} chooses its GPUs by itself; remove it, or set CUDA_VISIBLE_DEVICES"
            )
        return self

    @model_validator(mode="after")
    def _belongs_to_the_sampler(self) -> Settings:
        if self.sampler == "builtin" and (self.sampler_environment is not None or self.sampler_flags):
            raise ValueError(
                "sampler_environment and sampler_flags are for sampler `vllm` or `sglang`; set it, or remove them"
            )
        if self.sampler != "builtin" and self.quantization is not None:
            raise ValueError(f"quantization: {self.sampler} would sample from other weights; remove one of them")
        if self.sampler != "builtin" and self.deterministic_sampling:
            raise ValueError(f"deterministic_sampling: {self.sampler} does not promise it; remove it")
        return self

    @model_validator(mode="after")
    def _has_a_place_for_each_slot(self) -> Settings:
        if self.model_places is not None and self.model_places < self.adapter_slots:
            raise ValueError(
                f"model_places: {self.model_places} is less than adapter_slots, {self.adapter_slots}, "
                "and what is in memory has a place, too"
            )
        return self

    @model_validator(mode="after")
    def _hears_whoever_waits_in_a_poll(self) -> Settings:
        """A poll is a sign of life when it comes, or close to one that was noted a quarter of the timeout ago."""
        if self.session_timeout_seconds < 2 * self.poll_hold_seconds:
            raise ValueError(
                f"session_timeout_seconds: {self.session_timeout_seconds:g} is less than twice poll_hold_seconds, "
                f"{self.poll_hold_seconds:g}, and who waits in a held poll would be taken for dead; raise the first, "
                "or lower the second"
            )
        return self

    @property
    def listens_here_alone(self) -> bool:
        """Only this machine can reach it. Of a server that uvicorn's own command starts, `host` says nothing."""
        return is_loopback(self.host)

    @property
    def keeps_data_here(self) -> bool:
        """Otherwise the server needs no disk of its own: its container's may be read-only."""
        return self.database_url is None or self.checkpoint_root is None

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.data / 'tinsmith.db').absolute()}"

    @property
    def checkpoints_url(self) -> str:
        return self.checkpoint_root or (self.data / "checkpoints").absolute().as_uri()
