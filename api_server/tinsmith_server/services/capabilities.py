"""What this server can do for whom: its models."""

from __future__ import annotations

from tinsmith_server.fleet.base import Fleet
from tinsmith_server.services.inspection import Inspection
from tinsmith_server.wire.responses import SupportedModel


class Capabilities:
    """Running workers know the longest sequence better than the model's configuration does."""

    def __init__(self, fleet: Fleet, inspection: Inspection) -> None:
        self._fleet = fleet
        self._inspection = inspection

    def supported_models(self) -> list[SupportedModel]:
        return [
            SupportedModel(
                model_name=served.name,
                max_context_length=self._inspection.max_sequence_length(served.name) or served.max_context_length,
                trainable=served.training,
                sampleable=served.sampling,
            )
            for served in self._fleet.models
        ]
