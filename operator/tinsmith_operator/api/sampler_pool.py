"""The SamplerPool and the fields of its spec. The CRD defines the bounds and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import Field, ValidationError
from typing_extensions import override

from tinsmith_operator.api.base import Manifest, Resource, parse_quantity
from tinsmith_operator.api.names import POOL_KIND, POOL_LABEL, SAMPLER_APPLICATION, pool_workload_name
from tinsmith_operator.api.owner import Owner, identity_of, unreadable
from tinsmith_operator.api.serving_spec import GPU, PodOverrides, ServingSpec
from tinsmith_operator.api.status import SamplerPoolStatus


class SamplerEngine(StrEnum):
    BUILTIN = "builtin"
    VLLM = "vllm"
    SGLANG = "sglang"


class LoadedAdapters(Resource):
    """The limits on the adapters in each replica.

    The default of `max_rank` differs from the default in the CRD; `Adapters` of a session explains why.
    """

    max_loaded: int = 64
    max_rank: int = 64


class SamplerPodOverrides(PodOverrides):
    topology_spread_constraints: list[Manifest] = Field(default_factory=list)
    termination_grace_period_seconds: int = 600


class SamplerPoolSpec(ServingSpec):
    engine: SamplerEngine = SamplerEngine.BUILTIN
    server_arguments: list[str] = Field(default_factory=list)
    replicas: int = 1
    adapters: LoadedAdapters = LoadedAdapters()
    pod: SamplerPodOverrides = SamplerPodOverrides()

    @property
    def runs_a_server(self) -> bool:
        """True if each replica samples with a third-party server, on GPUs."""
        return self.engine is not SamplerEngine.BUILTIN

    @property
    def gpus(self) -> int:
        """The number of GPUs in each replica.

        The CRD admits whole numbers, and requires GPUs for a third-party server.
        """
        return int(parse_quantity(self.resources.limits.get(GPU, 0)))


@dataclass(frozen=True)
class SamplerPool(Owner):
    KIND = POOL_KIND
    NOUN = "pool"
    LABEL = POOL_LABEL
    APPLICATION = SAMPLER_APPLICATION
    COMPONENT = "sampler"

    spec: SamplerPoolSpec
    status: SamplerPoolStatus

    @property
    @override
    def workload_name(self) -> str:
        return pool_workload_name(self.name)


def parse_pool(body: Mapping[str, Any]) -> SamplerPool:
    """Return the pool. Raises Unreadable with the name of the field."""
    try:
        return SamplerPool(
            **identity_of(body),
            spec=SamplerPoolSpec.model_validate(body.get("spec", {})),
            status=SamplerPoolStatus.model_validate(body.get("status") or {}),
        )
    except ValidationError as error:
        raise unreadable(POOL_KIND, body, error) from error
