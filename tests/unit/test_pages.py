"""Files and snippets that pages in docs/ lead readers to, held against the code that they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from images.sources import IMAGES
from support.requirements import require
from tinsmith_server.configuration import load_settings
from tinsmith_trainer.engines import losses

ROOT = Path(__file__).parents[2]
SINGLE_MACHINE = ROOT / "examples" / "single-machine"
PYTHON_BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def test_systemd_takes_the_unit_of_the_single_machine(tmp_path: Path) -> None:
    require(shutil.which("systemd-analyze") is not None, "systemd-analyze is not installed")
    text = (SINGLE_MACHINE / "tinsmith.service").read_text()
    program = "/opt/tinsmith/bin/tinsmith"
    assert f"{program} serve --config /etc/tinsmith/server.yaml" in text
    unit = tmp_path / "tinsmith.service"
    unit.write_text(text.replace(program, sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_settings_of_the_single_machine_are_settings_and_its_pages_name_their_paths() -> None:
    settings = load_settings({}, SINGLE_MACHINE / "server.yaml")
    page = (ROOT / "docs" / "single-machine.md").read_text()
    assert f"keys create laptop --data {settings.data}" in page
    assert settings.models[0].partition("=")[2] in page


def test_the_image_of_the_single_machine_is_made_of_images_that_are_built() -> None:
    text = (SINGLE_MACHINE / "Dockerfile").read_text()
    named = re.findall(r"(?:^FROM |--from=)(\S+)", text, re.MULTILINE)
    assert set(named) == {IMAGES["trainer"].reference, IMAGES["api-server"].reference}
    packages, program = "/opt/tinsmith/lib/python3.13/site-packages", "/opt/tinsmith/bin/tinsmith"
    assert re.findall(r"^COPY --from=\S+ (\S+) (\S+)$", text, re.MULTILINE) == [(packages,) * 2, (program,) * 2]
    assert packages in IMAGES["trainer"].dockerfile.read_text()


def test_the_first_loss_of_the_page_passes_the_test_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    function, entry, test = PYTHON_BLOCK.findall((ROOT / "docs" / "first-loss.md").read_text())
    of_losses = dict(vars(losses))
    exec(function, of_losses)
    definitions = eval(f"{{{entry.strip()}}}", of_losses)
    monkeypatch.setattr(losses, "_DEFINITIONS", {**losses._DEFINITIONS, **definitions})
    of_tests = dict(vars(_tests_of_losses()))
    exec(test, of_tests)
    of_tests["test_log_ratio_is_minus_the_log_ratio_times_advantage"]()


def _tests_of_losses() -> SimpleNamespace:
    source = ROOT / "tests" / "unit" / "trainer" / "engines" / "test_losses.py"
    names = {"__name__": "tests_of_losses"}
    exec(compile(source.read_text(), source, "exec"), names)
    return SimpleNamespace(**names)
