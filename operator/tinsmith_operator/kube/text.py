"""Text in the forms and lengths that the API server accepts."""

from __future__ import annotations

import json
import re

from tinsmith_operator.api.base import Manifest

# DEL and the C1 controls, which YAML refuses; NEL, LS and PS, which it folds; a byte order mark, which it drops.
# Everything in the Basic Multilingual Plane has a six-character escape that JSON and YAML read alike.
_ESCAPED = re.compile("[\x7f-\uffff]")


def apply_patch(manifest: Manifest) -> str:
    r"""Return the manifest as JSON that YAML reads alike: the API server parses a server-side apply as YAML.

    JSON in ASCII writes a character beyond U+FFFF as a pair of surrogate escapes, `\ud83d\ude00`. The YAML parser
    refuses those, and with them the whole patch, so such characters are sent as they are. A surrogate without its
    other half becomes U+FFFD, as in the API server's JSON parser.
    """
    text = json.dumps(manifest, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", well_formed(text))


def well_formed(text: str) -> str:
    """Return the text with every lone surrogate replaced by U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shortened(text: str, most_bytes: int) -> str:
    """Return the text, cut so that its UTF-8 form has at most `most_bytes` bytes.

    The API server measures the fields of Events in bytes.
    """
    encoded = well_formed(text).encode()
    if len(encoded) <= most_bytes:
        return encoded.decode()
    ellipsis = "…"
    return encoded[: most_bytes - len(ellipsis.encode())].decode(errors="ignore") + ellipsis
