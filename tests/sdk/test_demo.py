"""The demo, as a newcomer runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_demo_trains_and_shows_what_it_did(tmp_path: Path) -> None:
    out = tmp_path / "demo-output"
    command = [sys.executable, "-m", "tinsmith", "demo", "--out", out]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    before, after = done.stdout.split("3. The same question again")
    assert "Pots, pans and lanterns." in after
    assert "Pots, pans and lanterns." not in before
    assert (out / "first_steps.png").read_bytes().startswith(b"\x89PNG")
    assert {file.name for file in (out / "adapter").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert "tinsmith doctor --wait 20 && tinker checkpoint list" in done.stdout
