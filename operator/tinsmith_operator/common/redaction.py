"""Quotes of other programs' messages.

The quotes are safe for people who may read a session, but who may not read the session's log or Secrets.

The program in a container writes its termination message. A user's own image can put Secrets into its termination
message in a hidden form. Therefore, a container is quoted only if the platform team trusts its image. For other images,
conditions say how the container ended and where to find the log. Reading a log requires a separate right. A quote is
one short line. Text that looks like a key is removed, because even a harmless library may print a key.
"""

from __future__ import annotations

import re
from unicodedata import category

LONGEST_QUOTE = 600
LONGEST_LAST_WORDS = 300
NO_TEXT = {"Cc", "Cs", "Cn", "Cf"}
"""Unicode categories: control characters, lone surrogates, unassigned code points, and format characters."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
HIDDEN = "[hidden]"

_WORD = r"[^\s'\"`,;)}\]]+"
_KEYS = re.compile(
    "|".join(
        (
            r"-----BEGIN [^-]*-----.*?(?:-----END [^-]*-----|$)",
            r"\b(?:tml-|hf_|sk-|ghp_|gho_|github_pat_|glpat-|xox[a-z]-)[A-Za-z0-9_-]{4,}",
            r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}",
            r"\beyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*",
            rf"(?<=://)[^\s/@]+:{_WORD}(?=@)",
        )
    )
)
_NAMED = re.compile(
    r"(?P<name>(?:\b|_)(?:password|passwd|pwd|secret|token|credentials?|api[_-]?key|access[_-]?key(?:[_-]?id)?|"
    r"secret[_-]?key|private[_-]?key|signature|authorization)[\"']?\s*(?:[=:]|\bis\b)\s*[\"']?)"
    rf"(?P<value>(?:bearer\s+|basic\s+)?{_WORD})",
    re.IGNORECASE,
)
_BEARER = re.compile(rf"(?P<name>\b(?:bearer|basic)\s+)(?P<value>{_WORD})", re.IGNORECASE)


def quoted(message: str, longest: int = LONGEST_QUOTE) -> str:
    """Return another program's message on one line, without a final full stop.

    Control and format characters are replaced, because such characters can hide or rewrite other text in a terminal.
    """
    line = " ".join(message.split()).rstrip(".")
    words = "".join(REPLACEMENT if category(letter) in NO_TEXT else letter for letter in line)
    return words if len(words) <= longest else words[: longest - 1] + "…"


def without_keys(message: str) -> str:
    """Return the text with keys hidden.

    Hide keys before the text is shortened, because even half of a key is secret.
    """
    line = _KEYS.sub(HIDDEN, " ".join(message.split()))
    return _BEARER.sub(rf"\g<name>{HIDDEN}", _NAMED.sub(rf"\g<name>{HIDDEN}", line))


def redacted_line(message: str) -> str:
    """Return the message of a trusted container on one short line, without keys."""
    return quoted(without_keys(message), LONGEST_LAST_WORDS)
