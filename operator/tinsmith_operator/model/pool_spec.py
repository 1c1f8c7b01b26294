"""The spec of a SamplerPool. As with a session's, the CRD is the authority, and a test compares the defaults."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tinsmith_operator.model.base import Manifest, Resource
from tinsmith_operator.model.parallelism import GPU
from tinsmith_operator.model.quantity import parse_quantity
from tinsmith_operator.model.spec import PodOverrides, ServingSpec


class SamplerEngine(StrEnum):
    BUILTIN = "builtin"
    VLLM = "vllm"
    SGLANG = "sglang"


class LoadedAdapters(Resource):
    """Of each replica."""

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
        """Whether each replica samples by a server of another maker, on GPUs."""
        return self.engine is not SamplerEngine.BUILTIN

    @property
    def gpus(self) -> int:
        """Of each replica. The CRD lets whole ones pass only, and demands one of those that run a server."""
        return int(parse_quantity(self.resources.limits.get(GPU, 0)))
