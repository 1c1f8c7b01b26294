"""Names of tenants.

Each name is a valid folder name on any file system, and differs from all other names on any file system.

The server checks a name when a key is created. The worker checks the name again before it opens the tenant's assets.
"""

from __future__ import annotations

import re

# No capitals and no final dot, which some file systems ignore, and no separators or spaces.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._@+-]{0,62}[a-z0-9])?")

RULE = (
    "a tenant's name has 1 to 64 small letters, digits, dots, underscores, hyphens, @ and + of ASCII, and begins and "
    "ends with a letter or digit"
)


def is_tenant_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None
