"""The search of checkpoints in the SDK from 0.39 on: its request and its answer.

The fields are those of the published API reference. `last_checkpoint_uuid` is for the server alone.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import AwareDatetime, Field

from tinsmith_server.wire.ids import CheckpointType
from tinsmith_server.wire.requests import MAX_TAGS, Metadata, Request, Words
from tinsmith_server.wire.responses import CheckpointResponse, Response
from tinsmith_server.wire.session_search import AccessibleOwner, OwnOwner, UserOwner


class CheckpointCursor(Request):
    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_checkpoint_uuid: str


class CheckpointSearchRequest(Request):
    project_ids: Annotated[Words, Field(max_length=MAX_TAGS)] | None = None
    user_metadata: Metadata = Field(default_factory=dict)
    checkpoint_type: CheckpointType | None = None
    owner: OwnOwner | AccessibleOwner | UserOwner = Field(OwnOwner(), discriminator="type")
    base_models: Annotated[Words, Field(max_length=MAX_TAGS)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: CheckpointCursor | None = None


class CheckpointSearchPosition(Response):
    last_created_at: datetime
    last_checkpoint_uuid: str


class CheckpointSearchResponse(Response):
    checkpoints: list[CheckpointResponse]
    next_cursor: CheckpointSearchPosition | None = None
