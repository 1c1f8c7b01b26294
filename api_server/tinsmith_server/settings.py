"""The settings and their defaults. `configuration.py` reads the values from their sources."""

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
# A GPU as in CUDA_VISIBLE_DEVICES: its index, or the UUID of a GPU or of a MIG slice.
GPU_PATTERN = r"0|[1-9][0-9]*|(GPU|MIG)-[\w/-]+"

OF_LOCAL_WORKERS = (
    "models",
    "devices",
    "preload_models",
    "suspend_after_seconds",
    "hang_timeout_seconds",
    "engine",
    "engine_flags",
    "quantization",
    "numerics",
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
    """Return whether the host is `localhost` or a loopback address, also an IPv4 address in IPv6 notation."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Settings(BaseSettings):
    """The settings of `tinsmith serve`. Every field has an effect."""

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
        """Leave out pydantic's files of variables and secrets.

        No such file is configured, and the search for files takes time.
        """
        return init_settings, env_settings

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 selects a free one.")
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Additional port that serves only /metrics, without a key, for Prometheus.",
    )
    scaler_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="Additional port by which KEDA scales SamplerPools.",
    )
    scaler_tls_directory: Path | None = Field(
        None,
        description="Directory with tls.crt, tls.key and ca.crt (KEDA's authority) for `scaler_port`; default: no TLS.",
    )
    pages_need_key: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Whether /docs, /manual/, /openapi.json and, on the main port, /metrics need a key; `auto`: yes, "
        "unless the server is reachable from this machine only.",
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Addresses or networks of proxies whose X-Forwarded-For and X-Forwarded-Proto are trusted.",
    )
    connections_per_address: int = Field(
        10_000,
        ge=1,
        description="Connections of one address, or its requests in flight behind a trusted proxy; at most half of "
        "the process's file limit.",
    )
    public_url: str | None = Field(None, description="URL of this server in links to files.")
    data: Path = Field(Path("tinsmith-data"), description="Directory for all state.")
    models: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="NAME[=PATH]: name for clients, and a directory or hub id."
    )
    devices: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Start one worker of each model on each of these devices: GPUs by index or UUID, as in `0,1`, or "
        "`cpu`; default: one worker, on a GPU if there is one.",
    )
    preload_models: bool = Field(True, description="Load models at start instead of at first use.")
    suspend_after_seconds: float | None = Field(
        None,
        ge=1,
        description="Stop a worker or sampler that no client has used for this long. The next request starts it again.",
    )
    hang_timeout_seconds: float = Field(
        1800,
        gt=0,
        description="Restart a worker if one microbatch, step or save takes longer.",
    )
    fleet: Literal["local", "kubernetes"] = Field(
        "local",
        description="Where workers run: `local` processes of this server, or TrainingSessions in `kubernetes`.",
    )
    fleet_namespaces: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Namespaces of TrainingSessions and SamplerPools, or `*` for all; default: the namespace of the "
        "server's pod.",
    )
    fleet_tls_directory: Path = Field(
        Path("/etc/tinsmith/tls"),
        description="Directory with tls.crt, tls.key and ca.crt for the connections to workers in a cluster.",
    )
    require_keys: bool = Field(
        True,
        description="Off: every program on this machine is tenant `default`, with any key or none; requests of other "
        "machines are refused.",
    )
    api_key: SecretStr | None = Field(None, description="Static key of tenant `default`; starts with `tml-`.")
    database_url: str | None = Field(None, description="SQLAlchemy URL; default: a SQLite file in the data directory.")
    checkpoint_root: str | None = Field(None, description="fsspec URL; default: a directory in the data directory.")

    session_timeout_seconds: Seconds = Field(
        900, description="A session without calls for this long is finished; at least twice `poll_hold_seconds`."
    )
    poll_hold_seconds: Seconds = Field(25, le=40, description="How long a poll without a result is held.")
    max_body_bytes: int = Field(
        64 * MIB, ge=MIB, description="Largest body of a training request, also after decompression."
    )
    max_sample_bytes: int = Field(8 * MIB, ge=MIB, description="Largest body of a sample; a token takes 2 to 7 bytes.")
    body_bytes_per_tenant: int = Field(
        256 * MIB,
        ge=MIB,
        description="Bytes of request bodies in flight for one tenant, and the same again for results; further ones "
        "wait.",
    )
    body_bytes_in_all: int = Field(
        512 * MIB, ge=MIB, description="The same for all tenants together; each byte takes up to three bytes of memory."
    )
    requests_per_minute: int = Field(
        0, ge=0, description="Requests of one key, except polls, heartbeats and telemetry; 0: no limit."
    )
    trained_tokens_per_minute: int = Field(
        0, ge=0, description="Tokens of one key's forward and forward_backward calls; 0: no limit."
    )
    sampled_tokens_per_minute: int = Field(0, ge=0, description="Sampled tokens of one key; 0: no limit.")
    adapters_per_tenant: int = Field(1024, ge=1, description="Models of one tenant, including waiting ones.")
    queued_operations_per_tenant: int = Field(10_000, ge=1, description="Queued operations of one tenant.")
    checkpoint_bytes_per_tenant: int = Field(4 * TIB, ge=1, description="Bytes of one tenant's named checkpoints.")
    recording_bytes_per_tenant: int = Field(4 * GIB, ge=1, description="Bytes of one tenant's recordings of agents.")
    reported_metrics_bytes_per_run: int = Field(
        16 * MIB, ge=1, description="Bytes of the metrics that a client reports for one run."
    )
    max_upload_bytes: int = Field(
        4 * GIB,
        ge=MIB,
        description="Largest file of an uploaded adapter; a worker reads it into memory.",
    )
    uploads_per_tenant: int = Field(8, ge=1, description="Simultaneous adapter uploads of one tenant.")
    samples_per_tenant: int = Field(32_768, ge=1, description="Samples in flight for one tenant; further ones wait.")
    token_exchange: bool = Field(
        False,
        description="Ask clients to exchange their key for one-hour tokens, so that the key is rarely sent; `tinker "
        "auth whoami` needs it.",
    )
    compress_training_bodies: bool = Field(
        False, description="Ask clients to compress with zstd; useful on slow networks."
    )
    stream_saves: bool = Field(
        True,
        description="In a cluster: let a pool's samplers fetch new weights from the memory of the worker that saved "
        "them. Off: they read the checkpoint root, which takes less CPU time.",
    )
    session_poller: bool = Field(
        False,
        description="Ask clients to poll once for all samples of a sampling client. It saves connections, but clients "
        "do not notice samples that are lost when this server's memory is lost.",
    )

    engine: str = Field("peft", description="Engine of the workers: `peft`, `nemo-rl`, `miles`, or `module:factory`.")
    engine_flags: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Additional flags of the worker, as on a command line: `--ranks 2`."
    )
    quantization: Literal["8bit", "4bit"] | None = Field(
        None, description="Quantization of the frozen base weights; default: none."
    )
    numerics: Literal["exact", "fast"] | None = Field(
        None,
        description="Whether a replay after a crash gives the same bits (`exact`) or differs by rounding (`fast`); "
        "default: `exact` on a CPU in float32, else `fast`.",
    )
    sampler: Literal["builtin", "vllm", "sglang"] = Field(
        "builtin",
        description="Sampler: `builtin` in the worker's process, or a server in a separate process.",
    )
    sampler_environment: Path | None = Field(
        None, description="Virtual environment of vLLM or SGLang; default: that of this server."
    )
    sampler_flags: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Additional flags of that sampler, as on a command line: "
        "`--server-argument=--gpu-memory-utilization=0.5`.",
    )
    adapter_slots: int = Field(8, ge=1, description="Adapters in the memory of one worker or sampler.")
    model_places: int | None = Field(
        None, ge=1, description="Models of one worker, in memory or parked; default: 8 for each adapter slot."
    )
    max_rank: int = Field(
        128,
        ge=1,
        description="Highest LoRA rank. Each slot may reserve memory for it. Recipes of the cookbook use up to 128.",
    )
    places_for_others: int = Field(
        1,
        ge=0,
        description="Places of a base model that are reserved for tenants without a place, while such a tenant has a "
        "session.",
    )
    lora_alpha: float = Field(32.0, gt=0, description="LoRA alpha, for every rank.")
    map_stable_reinforce: bool = Field(
        True, description="Run `stable_reinforce` as `cispo`, and report it in each result."
    )
    deterministic_sampling: bool = Field(
        False, description="Make samples independent of other requests in the batch; slower."
    )

    ephemeral_retention_seconds: float = Field(
        3600, ge=0, description="How long unnamed sampler weights outlive their session."
    )
    ephemeral_per_tenant: int = Field(256, ge=1, description="Unnamed sampler weights kept for one tenant.")
    autosave_ttl_seconds: float = Field(
        7 * DAY_SECONDS, ge=3600, description="How long the automatic checkpoint of a finished session is kept."
    )
    external_url_seconds: Seconds = Field(3600, description="Lifetime of a link for downloads or uploads.")

    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level of the log; `tinsmith serve` on a terminal uses `warning` by default."
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
        """Accept numbers: a file may contain `devices: [0, 1]`, or `devices: 0`."""
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
            raise ValueError("`*` means the whole cluster; use it alone, or only names")
        wrong = [name for name in value if name != EVERY_NAMESPACE and not re.fullmatch(NAMESPACE_PATTERN, name)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not a valid namespace")
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
        """Refuse settings that the chosen fleet does not read, because they would have no effect."""
        if self.fleet == "kubernetes":
            for name in OF_LOCAL_WORKERS:
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"{name}: has no effect with fleet `kubernetes`, where TrainingSessions set it; remove it"
                    )
            if self.checkpoint_root is None:
                raise ValueError(
                    "checkpoint_root: must be set with fleet `kubernetes`, to a location that all workers share"
                )
        elif self.fleet_namespaces or self.scaler_port is not None:
            raise ValueError("fleet_namespaces and scaler_port are for fleet `kubernetes`; set it, or remove them")
        if self.scaler_port is None and self.scaler_tls_directory is not None:
            raise ValueError("scaler_tls_directory: has no effect without scaler_port; set it, or remove this one")
        return self

    @model_validator(mode="after")
    def _is_for_this_machine_alone_without_keys(self) -> Settings:
        if not self.require_keys and (self.trusted_proxies or not self.listens_here_alone):
            raise ValueError(
                "require_keys: without keys only this machine has access, so host must be a loopback address such as "
                "127.0.0.1, and trusted_proxies empty; change them, or turn keys on"
            )
        return self

    @field_validator("devices")
    @classmethod
    def _are_devices(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        # CUDA also accepts "00" for GPU 0. Only one spelling is allowed, so that repeated devices are found.
        if wrong := [device for device in value if device != CPU and not re.fullmatch(GPU_PATTERN, device)]:
            raise ValueError(f"{wrong[0]!r} is not a device; give GPUs by index or UUID, as in `0,1`, or `cpu`")
        if twice := [device for device in value if device != CPU and value.count(device) > 1]:
            raise ValueError(f"device {twice[0]} is given twice; two workers would share its memory, so give it once")
        return value

    @model_validator(mode="after")
    def _has_engines_for_single_devices(self) -> Settings:
        if self.devices and self.engine != "peft":
            raise ValueError(
                f"devices: a worker of {self.engine} chooses its GPUs itself; remove the setting, or use "
                "CUDA_VISIBLE_DEVICES"
            )
        return self

    @model_validator(mode="after")
    def _belongs_to_the_sampler(self) -> Settings:
        if self.sampler == "builtin" and (self.sampler_environment is not None or self.sampler_flags):
            raise ValueError(
                "sampler_environment and sampler_flags are for sampler `vllm` or `sglang`; set it, or remove them"
            )
        if self.sampler != "builtin" and self.quantization is not None:
            raise ValueError(f"quantization: {self.sampler} would sample other weights; remove one of the settings")
        if self.sampler != "builtin" and self.deterministic_sampling:
            raise ValueError(f"deterministic_sampling: {self.sampler} does not support it; remove it")
        return self

    @model_validator(mode="after")
    def _has_a_place_for_each_slot(self) -> Settings:
        if self.model_places is not None and self.model_places < self.adapter_slots:
            raise ValueError(
                f"model_places: {self.model_places} is less than adapter_slots, {self.adapter_slots}, but models in "
                "memory count as well"
            )
        return self

    @model_validator(mode="after")
    def _keeps_sessions_alive_during_polls(self) -> Settings:
        """Refuse a timeout that would end sessions during a held poll.

        A poll counts as a sign of life only when it starts.
        """
        if self.session_timeout_seconds < 2 * self.poll_hold_seconds:
            raise ValueError(
                f"session_timeout_seconds: {self.session_timeout_seconds:g} is less than twice poll_hold_seconds, "
                f"{self.poll_hold_seconds:g}, so a client in a held poll would seem silent; raise the first, or lower "
                "the second"
            )
        return self

    @property
    def listens_here_alone(self) -> bool:
        """True if only this machine can reach the server. uvicorn's own command does not use `host`."""
        return is_loopback(self.host)

    @property
    def keeps_data_here(self) -> bool:
        """True if the server writes to its data directory.

        If the server does not write data, its container may be read-only.
        """
        return self.database_url is None or self.checkpoint_root is None

    @property
    def store_url(self) -> str:
        return self.database_url or f"sqlite:///{(self.data / 'tinsmith.db').absolute()}"

    @property
    def checkpoints_url(self) -> str:
        return self.checkpoint_root or (self.data / "checkpoints").absolute().as_uri()
