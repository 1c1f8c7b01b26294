"""How a finding is said."""

from __future__ import annotations

from tinsmith_operator.model.conditions import Finding
from tinsmith_operator.model.reasons import Reason

LONGEST_QUOTE = 600


def found(reason: Reason, what: str) -> Finding:
    """One sentence: what is the matter here; and the cure that the reason knows."""
    cure = reason.cure.replace("`", "")
    return Finding(reason, f"{what.rstrip('.')}; {cure[0].lower()}{cure[1:]}" if cure else what)


def quoted(message: str) -> str:
    """Somebody else's words on one line, without their last full stop."""
    words = " ".join(message.split()).rstrip(".")
    return words if len(words) <= LONGEST_QUOTE else words[: LONGEST_QUOTE - 1] + "…"
