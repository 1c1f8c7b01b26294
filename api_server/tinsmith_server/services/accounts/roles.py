"""Roles of keys, and the calls that each role may make. The functions are pure.

A reader may look, but not change, train or sample, because training and sampling cost. An SDK opens a session before it
makes its first call, so a reader may open one and keep it alive.
"""

from __future__ import annotations

from tinsmith_server.errors import Forbidden
from tinsmith_server.store.records import Role

_RANK: dict[Role, int] = {"reader": 0, "member": 1, "admin": 2}

CALLS_OF_ADMINS = frozenset(
    {
        "GET /keys",
        "POST /keys",
        "DELETE /keys/{key_id}",
        "GET /tenants",
        "PUT /tenants/{tenant}/limits",
        "GET /workers",
    }
)
"""The calls that concern all tenants."""

CALLS_OF_READERS = frozenset(
    {
        # Polls for the results of other calls.
        "POST /retrieve_future",
        "POST /retrieve_future/{request_id}",
        "POST /retrieve_futures",
        # Questions whose parameters are in a body.
        "POST /check_needs",
        "POST /checkpoints/search",
        "POST /get_info",
        "POST /sessions/search",
        "POST /weights_info",
        # The calls that an SDK makes by itself.
        "POST /auth/token",
        "POST /client/config",
        "POST /client/dynamic_config",
        "POST /create_session",
        "POST /session_heartbeat",
        # The login of the console.
        "POST /console/session",
    }
)
"""The calls of readers besides GET."""


def needed_role(method: str, path: str) -> Role:
    """Return the least role that may make the call.

    `path` is the template of the route, without the common prefix.
    """
    call = f"{method} {path}"
    if call in CALLS_OF_ADMINS:
        return "admin"
    return "reader" if method == "GET" or call in CALLS_OF_READERS else "member"


def check_role(role: Role, method: str, path: str) -> None:
    """Raise Forbidden if a key with this role may not make the call."""
    needed = needed_role(method, path)
    if _RANK[role] < _RANK[needed]:
        raise Forbidden(
            f"this key has the role {role}, and {method} {path} needs the role {needed}: use another key, or ask an "
            f"admin for one (`tinsmith keys create --role {needed}`)"
        )
