"""docs/reference/limits.md knows every limit that can be set."""

from __future__ import annotations

import re
from pathlib import Path

from tinsmith_server.settings import Settings

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "limits.md").read_text()
A_LIMIT = re.compile(r"_(per_(tenant|minute|address)|in_all|bytes)$")


def test_every_setting_that_is_a_limit_is_on_the_page() -> None:
    limits = {name for name in Settings.model_fields if A_LIMIT.search(name)}
    assert len(limits) > 10
    assert {name for name in limits if f"| `{name}` |" not in PAGE} == set()
