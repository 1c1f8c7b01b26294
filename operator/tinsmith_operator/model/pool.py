"""A SamplerPool as the rest of the operator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from typing_extensions import override

from tinsmith_operator.model.names import POOL_KIND, POOL_LABEL
from tinsmith_operator.model.owner import Owner, identity_of, unreadable
from tinsmith_operator.model.pool_spec import SamplerPoolSpec
from tinsmith_operator.model.status import SamplerPoolStatus


@dataclass(frozen=True)
class SamplerPool(Owner):
    KIND = POOL_KIND
    NOUN = "pool"
    LABEL = POOL_LABEL
    APPLICATION = "tinsmith-sampler"
    COMPONENT = "sampler"

    spec: SamplerPoolSpec
    status: SamplerPoolStatus

    @property
    @override
    def workload_name(self) -> str:
        """Other than a session's of the same name, which may be there for the same model."""
        return f"{self.name}-sampler"


def parse_pool(body: Mapping[str, Any]) -> SamplerPool:
    """Raises Unreadable, which names the field."""
    try:
        return SamplerPool(
            **identity_of(body),
            spec=SamplerPoolSpec.model_validate(body.get("spec", {})),
            status=SamplerPoolStatus.model_validate(body.get("status") or {}),
        )
    except ValidationError as error:
        raise unreadable(POOL_KIND, body, error) from error
