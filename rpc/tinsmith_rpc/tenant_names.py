"""Names of tenants: a name is one folder of any file system, and no two names are one folder.

The server checks a name where a key is made. The worker checks it again before it leads to a tenant's assets.
"""

from __future__ import annotations

import re

# No capitals and no dot at the end, which some file systems leave out of account; neither separators nor spaces.
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._@+-]{0,62}[a-z0-9])?")

RULE = (
    "a tenant's name has 1 to 64 small letters, digits, dots, underscores, hyphens, @ and + of ASCII, and begins and "
    "ends with a letter or digit"
)


def is_tenant_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None
