"""The operator's settings, environment variables `TINSMITH_OPERATOR_…`."""

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
from tinsmith_operator.installation import Installation, Scope, parse_scope, remote_port
from tinsmith_operator.policy import ANY, Reserved
from tinsmith_operator.restarts import RestartPolicy, parse_policy

# What an environment can hold, whoever reads it.
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Seconds = Annotated[float, Field(gt=0)]


def unique_identity() -> str:
    """Of this process: another run of the same pod is somebody else, who may still be writing."""
    return f"{socket.gethostname()}_{secrets.token_hex(4)}"


class InstallationNames(BaseModel):
    """As the chart writes them, the one place that knows them all."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)

    secrets: list[str] = Field(default_factory=list)
    pull_secrets: list[str] = Field(default_factory=list)
    claims: list[str] = Field(default_factory=list)
    accounts: list[str] = Field(default_factory=list)


class Settings(BaseSettings):
    """Every field does something."""

    model_config = SettingsConfigDict(env_prefix="TINSMITH_OPERATOR_", extra="forbid", frozen=True)

    namespace: str = Field(description="Namespace of the release, where this operator and its certificates are.")
    release: str = Field("tinsmith", description="Name of the release; the defaults of other names begin with it.")
    watch_namespaces: str = Field(
        "",
        description="Namespaces that are watched, with commas between them; empty: the release's own; `*`: the "
        "whole cluster.",
    )

    trainer_image: str = Field(description="Image of workers whose session names none.")
    trainer_image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="Pull policy of workers whose session names none."
    )
    checkpoint_root: str = Field(description="URL that workers write checkpoints to.")
    checkpoint_claim: str | None = Field(
        None, description="Claim behind a `file://` checkpoint root; every worker mounts it."
    )
    checkpoint_environment: dict[str, str] = Field(
        default_factory=dict,
        description="Variables for workers by which they reach a remote checkpoint root, as a JSON object.",
    )
    checkpoint_secret: str | None = Field(
        None,
        description="Secret in each worker's namespace, whose keys are such variables too; none: there is none.",
    )

    installation_names: InstallationNames = Field(
        default_factory=InstallationNames,
        description="Names of the installation's own Secrets, claims and ServiceAccounts, beside those of other "
        "settings, as a JSON object of the lists `secrets`, `pullSecrets`, `claims` and `accounts`; sessions and pools "
        "may not name them, but for pulling images with `pullSecrets`.",
    )
    allowed_images: list[str] = Field(
        [ANY],
        description="Images that sessions and pools may name beside those of the trainer image's repository, as a JSON "
        "list of patterns in which `*` stands for any text; one without a tag is for all tags and digests.",
    )
    allowed_secrets: list[str] = Field(
        [ANY],
        description="Secrets that sessions and pools may name, as a JSON list of such patterns; the installation's own "
        "never.",
    )

    ray_version: str | None = Field(
        None,
        description="Version of Ray in the images of sessions of several nodes, for KubeRay; none: that of the "
        "project's own images.",
    )
    ray_cluster_labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels on the RayClusters of such sessions, as a JSON object, such as those by which KubeRay asks "
        "the cluster's scheduler to start all pods of one together.",
    )
    discovery_seconds: Seconds = Field(
        30, description="How often the cluster is asked for KubeRay's kind, while a session waits for it."
    )

    ca_secret: str = Field("", description="Secret of the certificate authority; empty: `<release>-ca`.")
    ca_pause_seconds: float = Field(
        300,
        ge=0,
        description="While one authority takes over from another: how long after the last Secret was written every "
        "process has surely read its files. The kubelet takes up to two minutes.",
    )
    api_server_tls_secret: str = Field(
        "", description="Secret with the API server's client certificate; empty: `<release>-api-server-tls`."
    )
    first_key_secret: str | None = Field(
        None,
        description="Secret that gets the API server's first key, where it is not there yet; none: no key is made.",
    )

    hang_timeout_seconds: Seconds = Field(
        1800, description="A worker that is at one microbatch, or one step or save, for longer is restarted."
    )
    delete_grace_seconds: Seconds = Field(
        600, description="How long a deletion waits for the session's adapters to be saved elsewhere."
    )
    resync_seconds: Seconds = Field(
        600, description="Every session is reconciled at least this often; costs no request."
    )
    describe_seconds: float = Field(60, ge=1, description="How often a worker is asked for its state (`Describe`).")
    concurrent_reconciles: int = Field(4, ge=1, description="Sessions and pools reconciled at the same time.")

    restart_automatically: bool = Field(
        False,
        description="Whether sessions restart, in turn, for what nobody asked of them: another default image, other "
        "settings for checkpoints.",
    )
    restart_budget: str = Field(
        "1",
        description="How many sessions do so at the same time: a number, or a share of those that run such as `10%`.",
    )
    restart_window: str = Field(
        "",
        description="When such restarts begin, in UTC: `02:00-05:00`, or on some days `Sat,Sun 22:00-04:00`; empty: "
        "at any time.",
    )

    lease_name: str = Field("", description="Lease for leader election; empty: `<release>-operator`.")
    lease_seconds: int = Field(15, ge=3, description="How long after its leader's death another operator begins.")
    lease_renew_seconds: float | None = Field(
        None,
        gt=0,
        description="How often the leader renews the lease, at most a third of its duration; none: a fifth.",
    )
    identity: str = Field(
        default_factory=unique_identity,
        description="Name in the lease, other than of any process that may run beside this one; default: a fresh one.",
    )

    max_requests_per_second: float = Field(
        10, gt=0, description="Requests to the Kubernetes API per second, on average; watches and the Lease are none."
    )
    burst: int = Field(50, ge=1, description="Requests to the Kubernetes API in a burst.")

    health_port: int = Field(8080, ge=0, le=65535, description="Port of `/healthz` and `/readyz`; 0 takes a free one.")
    metrics_port: int = Field(9090, ge=0, le=65535, description="Port of `/metrics`; 0 takes a free one.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much is logged.")

    failpoint: int = Field(0, ge=0, description="For tests: the process kills itself before its n-th write; 0: never.")

    @model_validator(mode="after")
    def _a_local_root_needs_a_claim(self) -> Self:
        if not self.installation().checkpoint_root_is_remote and self.checkpoint_claim is None:
            raise ValueError(
                f"checkpoint_root {self.checkpoint_root} is a directory in the workers' pods: name the claim that "
                "holds it as checkpoint_claim, or use a remote root such as s3://bucket/checkpoints"
            )
        return self

    @model_validator(mode="after")
    def _a_lease_is_renewed_in_time(self) -> Self:
        renew = self.lease_renew_seconds
        if renew is not None and renew * 3 > self.lease_seconds:
            raise ValueError(
                f"lease_renew_seconds is {renew:g}, and lease_seconds {self.lease_seconds}: a leader that cannot renew "
                "for two thirds of the lease stops acting, so renew it at least three times in its duration"
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

    @field_validator("checkpoint_environment")
    @classmethod
    def _variables_can_be_set(cls, environment: dict[str, str]) -> dict[str, str]:
        for name in environment:
            if name in OWN_VARIABLES or not VARIABLE_NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} cannot be set for workers: it is no variable's name, or set by the operator"
                )
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
        """What decisions need to know."""
        return Installation(
            namespace=self.namespace,
            release=self.release,
            trainer_image=self.trainer_image,
            trainer_image_pull_policy=self.trainer_image_pull_policy,
            checkpoint_root=self.checkpoint_root,
            checkpoint_claim=self.checkpoint_claim,
            checkpoint_environment=self.checkpoint_environment,
            checkpoint_secret=self.checkpoint_secret or None,
            ray_version=self.ray_version,
            ray_cluster_labels=self.ray_cluster_labels,
            hang_timeout_seconds=self.hang_timeout_seconds,
            delete_grace_seconds=self.delete_grace_seconds,
            reserved=self._reserved(),
            allowed_images=tuple(self.allowed_images),
            allowed_secrets=tuple(self.allowed_secrets),
        )

    def _reserved(self) -> Reserved:
        """Those that are told, and those that other settings name."""
        told = self.installation_names
        keys = (self.ca_secret_name, self.api_server_tls_secret_name, self.first_key_secret, self.checkpoint_secret)
        return Reserved(
            secrets=frozenset({*told.secrets, *(name for name in keys if name)}),
            pull_secrets=frozenset(told.pull_secrets),
            claims=frozenset({*told.claims, *([self.checkpoint_claim] if self.checkpoint_claim else [])}),
            accounts=frozenset(told.accounts),
        )


def unknown_variables() -> list[str]:
    """In the environment, with our prefix, that set nothing."""
    prefix = str(Settings.model_config["env_prefix"])
    known = {f"{prefix}{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
