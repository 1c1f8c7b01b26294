"""The searches of the SDK for sessions and checkpoints: their requests and answers.

The fields of a search for checkpoints are those of the published API reference of SDK 0.39. Only the server interprets
`last_checkpoint_uuid`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field

from tinsmith_server.wire.ids import CheckpointType
from tinsmith_server.wire.requests import MAX_TAGS, Metadata, Request, Words
from tinsmith_server.wire.responses import CheckpointResponse, Response


class SearchCursor(Request):
    last_created_at: Annotated[AwareDatetime, Field(strict=False)]
    last_session_id: str


class OwnOwner(Request):
    type: Literal["own"] = "own"


class AccessibleOwner(Request):
    type: Literal["accessible"] = "accessible"


class UserOwner(Request):
    type: Literal["user"] = "user"
    owner_urns: Annotated[Words, Field(min_length=1, max_length=10)]


class StatusQuery(Request):
    type: Literal["active", "cancelled", "failed"]


class ClientFinishedQuery(Request):
    type: Literal["client_finished"]
    reasons: list[Literal["success", "errored", "interrupted"]] | None = Field(None, min_length=1, max_length=3)


class SessionSearchRequest(Request):
    session_id: str | None = None
    project_ids: Annotated[Words, Field(max_length=MAX_TAGS)] | None = None
    user_metadata: Metadata = Field(default_factory=dict)
    display_name: str | None = Field(None, min_length=1, max_length=256)
    owner: OwnOwner | AccessibleOwner | UserOwner = Field(OwnOwner(), discriminator="type")
    statuses: list[StatusQuery | ClientFinishedQuery] | None = Field(None, min_length=1, max_length=8)
    limit: Annotated[int, Field(ge=1, le=200)] = 50
    cursor: SearchCursor | None = None


class AssignProjectRequest(Request):
    project_id: str = Field(min_length=1, max_length=256)


class SessionStatus(Response):
    """The status of a session. `reason` is set only for `client_finished`."""

    type: Literal["active", "cancelled", "client_finished"]
    reason: dict[str, str] | None = None
    detail: str | None = None


class SessionSummary(Response):
    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int


class SearchPosition(Response):
    last_created_at: datetime
    last_session_id: str


class SessionSearchResponse(Response):
    sessions: list[SessionSummary]
    next_cursor: SearchPosition | None = None


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
