"""What an SDK of some version knows, by the version that it says in its requests."""

from __future__ import annotations

import re

from tinsmith_server.wire.ids import TYPE_OF_KIND, CheckpointType

VERSION_HEADER = "x-stainless-package-version"
ALL_TYPES: frozenset[CheckpointType] = frozenset(TYPE_OF_KIND.values())
FIRST_WITH_EXTERNAL = (0, 28)
"""Those before fail on a whole list for one checkpoint of a type that they do not know."""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?!\d)")


def known_checkpoint_types(version: str | None) -> frozenset[CheckpointType]:
    """All of them to a client that says no version, or none of the SDK's form."""
    found = _VERSION.match(version or "")
    if found and (int(found[1]), int(found[2])) < FIRST_WITH_EXTERNAL:
        return ALL_TYPES - {"external"}
    return ALL_TYPES
