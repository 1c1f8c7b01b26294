"""Example files and snippets of docs/, checked against the code that they belong to."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from images.sources import IMAGES
from support.requirements import require
from tinsmith_server.configuration import load_settings
from tinsmith_trainer.engines import losses

ROOT = Path(__file__).parents[2]
SINGLE_MACHINE = ROOT / "examples" / "single-machine"
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_systemd_accepts_the_unit_for_a_single_machine(tmp_path: Path) -> None:
    require(shutil.which("systemd-analyze") is not None, "systemd-analyze is not installed")
    text = (SINGLE_MACHINE / "tinsmith.service").read_text()
    program = "/opt/tinsmith/bin/tinsmith"
    assert f"{program} serve --config /etc/tinsmith/server.yaml" in text
    unit = tmp_path / "tinsmith.service"
    unit.write_text(text.replace(program, sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_server_accepts_the_settings_for_a_single_machine_and_the_page_uses_their_paths() -> None:
    settings = load_settings({}, SINGLE_MACHINE / "server.yaml")
    page = (ROOT / "docs" / "how-to" / "single-machine.md").read_text()
    assert f"keys create laptop --data {settings.data}" in page
    assert settings.models[0].partition("=")[2] in page


def test_the_image_for_a_single_machine_combines_images_that_make_builds() -> None:
    text = (SINGLE_MACHINE / "Dockerfile").read_text()
    named = re.findall(r"(?:^FROM |--from=)(\S+)", text, re.MULTILINE)
    assert set(named) == {IMAGES["trainer"].reference, IMAGES["api-server"].reference}
    packages, program = "/opt/tinsmith/lib/python3.13/site-packages", "/opt/tinsmith/bin/tinsmith"
    assert re.findall(r"^COPY --from=\S+ (\S+) (\S+)$", text, re.MULTILINE) == [(packages,) * 2, (program,) * 2]
    assert packages in IMAGES["trainer"].dockerfile.read_text()


def test_the_first_loss_of_the_page_passes_the_test_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    function, entry, test = PYTHON_BLOCK.findall((ROOT / "docs" / "how-to" / "first-loss.md").read_text())
    losses_namespace = dict(vars(losses))
    exec(function, losses_namespace)
    definitions = eval(f"{{{entry.strip()}}}", losses_namespace)
    monkeypatch.setattr(losses, "_DEFINITIONS", {**losses._DEFINITIONS, **definitions})
    tests_namespace = dict(vars(_tests_of_losses()))
    exec(test, tests_namespace)
    tests_namespace["test_log_ratio_is_minus_the_log_ratio_times_advantage"]()


def _tests_of_losses() -> SimpleNamespace:
    source = ROOT / "tests" / "unit" / "trainer" / "engines" / "test_losses.py"
    names: dict[str, Any] = {"__name__": "tests_of_losses"}
    exec(compile(source.read_text(), source, "exec"), names)
    return SimpleNamespace(**names)
