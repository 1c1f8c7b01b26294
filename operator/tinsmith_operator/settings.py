"""The operator's settings, read from environment variables `TINSMITH_OPERATOR_…`."""

from __future__ import annotations

import os
import re
import secrets
import socket
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_settings import BaseSettings, SettingsConfigDict

from tinsmith_operator.build.pod import OWN_VARIABLES
from tinsmith_operator.installation import Installation, Scope, collector_port, parse_scope, remote_port
from tinsmith_operator.policy import ANY, Reserved
from tinsmith_operator.restarts import RestartPolicy, parse_policy

# The characters that the name of an environment variable may have.
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Seconds = Annotated[float, Field(gt=0)]


def unique_identity() -> str:
    """Return an identity for this process.

    The identity must be unique, because an earlier process in the same pod may still be writing.
    """
    return f"{socket.gethostname()}_{secrets.token_hex(4)}"


class InstallationNames(BaseModel):
    """The names of the installation's own objects, in the chart's format."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)

    secrets: list[str] = Field(default_factory=list)
    pull_secrets: list[str] = Field(default_factory=list)
    claims: list[str] = Field(default_factory=list)
    accounts: list[str] = Field(default_factory=list)


class Settings(BaseSettings):
    """The settings of the operator."""

    model_config = SettingsConfigDict(env_prefix="TINSMITH_OPERATOR_", extra="forbid", frozen=True)

    namespace: str = Field(description="Namespace of the release, with the operator and its certificates.")
    release: str = Field("tinsmith", description="Name of the release. Other names start with it by default.")
    watch_namespaces: str = Field(
        "",
        description="Watched namespaces, separated by commas; empty: the release's own; `*`: the whole cluster.",
    )

    trainer_image: str = Field(description="Default image of workers.")
    trainer_image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Default pull policy of workers."
    )
    checkpoint_root: str = Field(description="URL that workers write checkpoints to.")
    checkpoint_claim: str | None = Field(
        None, description="Claim behind a `file://` checkpoint root; every worker mounts it."
    )
    checkpoint_environment: dict[str, str] = Field(
        default_factory=dict,
        description="Variables of workers for a remote checkpoint root, as a JSON object.",
    )
    checkpoint_secret: str | None = Field(
        None,
        description="Secret in each worker's namespace with further such variables; default: none.",
    )

    tracing_endpoint: str | None = Field(
        None, description="URL of an OTLP collector to which workers and samplers send traces; default: no traces."
    )

    installation_names: InstallationNames = Field(
        default_factory=InstallationNames,
        description="Further names of the installation, as a JSON object of the lists `secrets`, `pullSecrets`, "
        "`claims` and `accounts`. Sessions and pools may not use them; they may only pull images with `pullSecrets`.",
    )
    allowed_images: list[str] = Field(
        [ANY],
        description="Images that sessions and pools may use in addition to the trainer image's repository, as a JSON "
        "list of patterns with `*`.",
    )
    allowed_secrets: list[str] = Field(
        [ANY],
        description="Secrets that sessions and pools may use, as a JSON list of such patterns.",
    )

    ray_version: str | None = Field(
        None,
        description="Version of Ray in the images of sessions of several nodes; default: that of the project's images.",
    )
    ray_cluster_labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels on the RayClusters of such sessions, as a JSON object.",
    )
    discovery_seconds: Seconds = Field(
        30, description="Seconds between two looks for KubeRay while a session waits for it."
    )

    ca_secret: str = Field("", description="Secret of the certificate authority; empty: `<release>-ca`.")
    ca_pause_seconds: float = Field(
        300,
        ge=0,
        description="Seconds between two steps of a rotation of the authority, until all processes have read it.",
    )
    api_server_tls_secret: str = Field(
        "", description="Secret with the API server's client certificate; empty: `<release>-api-server-tls`."
    )
    first_key_secret: str | None = Field(
        None,
        description="Secret for the API server's first key, created if it does not exist; default: no key is created.",
    )

    hang_timeout_seconds: Seconds = Field(
        1800, description="A worker is restarted if one microbatch, step or save takes longer than these seconds."
    )
    delete_grace_seconds: Seconds = Field(
        600, description="Seconds for which a deletion waits until the session's adapters are saved."
    )
    resync_seconds: Seconds = Field(
        3600, description="Period in which each session is reconciled once, even without an event; it costs no request."
    )
    describe_seconds: float = Field(60, ge=1, description="Seconds between two calls of `Describe` to a worker.")
    concurrent_reconciles: int = Field(16, ge=1, description="Sessions and pools reconciled at the same time.")

    restart_automatically: bool = Field(
        False,
        description="Whether sessions restart automatically, in turn, for another default image or other settings of "
        "the installation.",
    )
    restart_budget: str = Field(
        "1",
        description="How many sessions restart automatically at the same time: a number, or a share such as `10%`.",
    )
    restart_window: str = Field(
        "",
        description="When automatic restarts start, in UTC: `02:00-05:00` or `Sat,Sun 22:00-04:00`; empty: any time.",
    )

    lease_name: str = Field("", description="Lease for leader election; empty: `<release>-operator`.")
    lease_seconds: int = Field(15, ge=3, description="Seconds after its leader's death until another operator acts.")
    lease_renew_seconds: float | None = Field(
        None,
        gt=0,
        description="Seconds between two renewals of the lease, at most a third of its duration; default: a fifth.",
    )
    identity: str = Field(
        default_factory=unique_identity,
        description="Name in the lease, unique to this process; default: a random one.",
    )

    max_requests_per_second: float = Field(
        100, gt=0, description="Requests to the Kubernetes API per second, on average, without watches and the Lease."
    )
    burst: int = Field(200, ge=1, description="Requests to the Kubernetes API in a burst.")

    health_port: int = Field(8080, ge=0, le=65535, description="Port of `/healthz` and `/readyz`; 0 takes a free one.")
    metrics_port: int = Field(9090, ge=0, le=65535, description="Port of `/metrics`; 0 takes a free one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level to log.")

    failpoint: int = Field(0, ge=0, description="For tests: the process kills itself before its n-th write; 0: never.")

    @model_validator(mode="after")
    def _a_local_root_needs_a_claim(self) -> Self:
        if not self.installation().checkpoint_root_is_remote and self.checkpoint_claim is None:
            raise ValueError(
                f"checkpoint_root {self.checkpoint_root} is a directory in the workers' pods: set checkpoint_claim to "
                "the claim that holds it, or use a remote root such as s3://bucket/checkpoints"
            )
        return self

    @model_validator(mode="after")
    def _a_lease_is_renewed_in_time(self) -> Self:
        renew = self.lease_renew_seconds
        if renew is not None and renew * 3 > self.lease_seconds:
            raise ValueError(
                f"lease_renew_seconds is {renew:g}, and lease_seconds {self.lease_seconds}: set lease_renew_seconds to "
                "at most a third of it, since a leader stops acting two thirds of the lease after its last renewal"
            )
        return self

    @model_validator(mode="after")
    def _restarts_can_be_paced(self) -> Self:
        _ = self.restart_policy
        return self

    @model_validator(mode="after")
    def _namespaces_are_names(self) -> Self:
        parse_scope(self.watch_namespaces, self.namespace)
        return self

    @field_validator("tracing_endpoint")
    @classmethod
    def _collector_has_a_port(cls, endpoint: str | None) -> str | None:
        if endpoint is not None:
            collector_port(endpoint)
        return endpoint

    @field_validator("checkpoint_environment")
    @classmethod
    def _variables_can_be_set(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if name in OWN_VARIABLES or not VARIABLE_NAME.fullmatch(name):
                raise ValueError(f"{name!r} cannot be set for workers: it is not a valid name, or the operator sets it")
        remote_port(environment)
        return environment

    @property
    def scope(self) -> Scope:
        return parse_scope(self.watch_namespaces, self.namespace)

    @property
    def restart_policy(self) -> RestartPolicy:
        return parse_policy(
            automatic=self.restart_automatically, budget=self.restart_budget, window=self.restart_window
        )

    @property
    def ca_secret_name(self) -> str:
        return self.ca_secret or f"{self.release}-ca"

    @property
    def api_server_tls_secret_name(self) -> str:
        return self.api_server_tls_secret or f"{self.release}-api-server-tls"

    @property
    def lease(self) -> str:
        return self.lease_name or f"{self.release}-operator"

    def installation(self) -> Installation:
        """Return the settings that decisions need as an Installation."""
        return Installation(
            namespace=self.namespace,
            release=self.release,
            trainer_image=self.trainer_image,
            trainer_image_pull_policy=self.trainer_image_pull_policy,
            checkpoint_root=self.checkpoint_root,
            checkpoint_claim=self.checkpoint_claim,
            checkpoint_environment=self.checkpoint_environment,
            checkpoint_secret=self.checkpoint_secret or None,
            tracing_endpoint=self.tracing_endpoint,
            ray_version=self.ray_version,
            ray_cluster_labels=self.ray_cluster_labels,
            hang_timeout_seconds=self.hang_timeout_seconds,
            delete_grace_seconds=self.delete_grace_seconds,
            reserved=self._reserved(),
            allowed_images=tuple(self.allowed_images),
            allowed_secrets=tuple(self.allowed_secrets),
        )

    def _reserved(self) -> Reserved:
        """Return the reserved names from `installation_names` and from other settings."""
        names = self.installation_names
        keys = (self.ca_secret_name, self.api_server_tls_secret_name, self.first_key_secret, self.checkpoint_secret)
        return Reserved(
            secrets=frozenset({*names.secrets, *(name for name in keys if name)}),
            pull_secrets=frozenset(names.pull_secrets),
            claims=frozenset({*names.claims, *([self.checkpoint_claim] if self.checkpoint_claim else [])}),
            accounts=frozenset(names.accounts),
        )


def unknown_variables() -> list[str]:
    """Return the variables that have the operator's prefix but name no setting."""
    prefix = str(Settings.model_config["env_prefix"])
    known = {f"{prefix}{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
