"""Bodies of the calls of administrators, and of the console's session."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

from tinsmith_server.wire.responses import Response

Role: TypeAlias = Literal["admin", "member", "reader"]


class ConsoleSessionResponse(Response):
    """The session of a console. `expires_at` is null if the server requires no keys."""

    tenant: str
    role: Role
    key_name: str
    csrf_token: str
    expires_at: datetime | None
