"""The demo, and README's way from it to an evaluated adapter, as a newcomer takes them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(500)

README = Path(__file__).parents[2] / "README.md"
HEADING = "### From `pip install` to an evaluated adapter"
INSTALLS, MAKES_THE_DEMO, SERVES = "pip install", "tinsmith demo && cd demo-output", "tinsmith serve"
SAMPLER = "tinker://…/sampler_weights/step-129"
READ_SAMPLER = f"$({sys.executable} -c \"import json; print(json.load(open('sft-run/summary.json'))['sampler'])\")"


@dataclass(frozen=True, slots=True)
class Demo:
    out: Path
    said: str


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    out = tmp_path_factory.mktemp("newcomer") / "demo-output"
    command = [sys.executable, "-m", "tinsmith", "demo", "--out", out]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    return Demo(out, done.stdout)


def test_the_demo_trains_and_shows_what_it_did(demo: Demo) -> None:
    before, after = demo.said.split("3. The same question again")
    assert "Pots, pans and lanterns." in after
    assert "Pots, pans and lanterns." not in before
    assert (demo.out / "first_steps.png").read_bytes().startswith(b"\x89PNG")
    made = {file.name for file in (demo.out / "adapter").iterdir()}
    assert made >= {"adapter_config.json", "adapter_model.safetensors"}
    assert "tinsmith doctor --wait 20 && tinker checkpoint list" in demo.said


def test_readme_leads_from_the_demo_to_an_evaluated_and_promoted_adapter(demo: Demo) -> None:
    lines = [_as_here(line, demo) for line in _walk() if not line.startswith(INSTALLS)]
    script = "\n".join(["set -e", *lines, "kill %1", "wait"])
    shell = ["bash", "-m", "-c", script]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        shell,
        cwd=demo.out.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((demo.out / "sft-run" / "summary.json").read_text())
    assert f"greeter stands for {summary['sampler']}" in done.stdout
    evaluated = (demo.out / "evaluation" / "results.csv").read_text().splitlines()
    assert float(evaluated[-1].split(",")[evaluated[0].split(",").index("mean")]) > 0.5, evaluated


def _walk() -> list[str]:
    """The commands of README's section."""
    section = README.read_text().partition(HEADING)[2]
    found = re.search(r"```\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def _as_here(line: str, demo: Demo) -> str:
    """The demo was run already, where its server's port was taken it has another one, and a reader copies a path."""
    if line.startswith(MAKES_THE_DEMO):
        return f"cd {demo.out.name} && source environment"
    if line.startswith(SERVES):
        return line.replace(SERVES, f"{SERVES} --port ${{TINKER_BASE_URL##*:}}")
    return line.replace(SAMPLER, READ_SAMPLER)
