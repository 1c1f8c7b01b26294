"""The key that makes a request, and how the audit log names it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tinsmith_server.store.records import ApiKey, AuditEntry, Role

DEFAULT_TENANT = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """The key that makes a request, or the key whose token makes it. `key_id` is 0 for a key without a row."""

    tenant: str
    role: Role
    name: str = ""
    prefix: str = ""
    key_id: int = 0

    @classmethod
    def of(cls, key: ApiKey) -> Caller:
        return cls(key.tenant, key.role, key.name, key.prefix, key.key_id)

    @property
    def signature(self) -> dict[str, Any]:
        """The details by which an audit entry names the key."""
        return {"key_id": self.key_id, "tenant": self.tenant, "name": self.name, "prefix": self.prefix}


STATIC_KEY = Caller(DEFAULT_TENANT, "admin", "the server's static key")
LOCAL_CALLER = Caller(DEFAULT_TENANT, "admin")
"""The caller if keys are not required, and the request has no known key."""
COMMAND_LINE = Caller("", "admin", "the command line of the server")

_acting: ContextVar[Caller | None] = ContextVar("acting", default=None)


def act_as(caller: Caller | None) -> None:
    """Make the caller the author of all entries that the current request writes."""
    _acting.set(caller)


def signed(details: dict[str, Any]) -> dict[str, Any]:
    """Return the details of an entry with the key of the current request.

    Background work has no key, and a server without keys knows no author.
    """
    caller = _acting.get()
    return details if caller is None or caller is LOCAL_CALLER else {**details, "key": caller.signature}


def acting_key_id() -> int | None:
    caller = _acting.get()
    return None if caller is None or caller is LOCAL_CALLER else caller.key_id


def account_entry(tenant: str, at: datetime, event: str, **details: Any) -> AuditEntry:
    """Return the entry for a change of a tenant's keys or limits. Such an entry concerns no checkpoint."""
    return AuditEntry(tenant, at, event, "", "", signed({"tenant": tenant, **details}))
