"""The code blocks of README, for the tests that type them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def blocks(section: str, language: str) -> list[str]:
    """Return the blocks of one language in a section of README."""
    text = README.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
