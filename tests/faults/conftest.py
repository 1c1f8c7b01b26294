"""A server whose worker starts in a moment, for faults that are not about torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.servers import REFERENCE_ENGINE, REFERENCE_MODEL, ServedInstallation


@pytest.fixture
def reference_server(tmp_path: Path) -> Iterator[ServedInstallation]:
    model = tmp_path / "reference"
    model.mkdir()
    (model / "config.json").write_text("{}")
    installation = ServedInstallation(tmp_path / "data", {REFERENCE_MODEL: model}, {"engine": REFERENCE_ENGINE})
    yield installation.start()
    installation.stop()
