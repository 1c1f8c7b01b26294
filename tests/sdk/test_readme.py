"""The README as a newcomer types it: each block, from top to bottom, in a clean environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.readme import ROOT, blocks

pytestmark = pytest.mark.timeout(900)

URL = "URL-OF-THIS-REPOSITORY"
SERVES = "tinsmith serve --data server"
MODEL = '"Qwen/Qwen3-0.6B"'
# Where a command fails, the server in the background would keep the output open indefinitely.
STOPS_ITS_SERVER = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
# What a person's shell has; neither this environment nor what the tests set.
KEPT_VARIABLES = ("HOME", "LANG", "PATH", "PYENV_ROOT", "SSL_CERT_FILE", "UV_CACHE_DIR", "UV_DEFAULT_INDEX")


@dataclass(frozen=True, slots=True)
class Typed:
    folder: Path
    text: str
    answers: str

    @property
    def output(self) -> Path:
        return self.folder / "tinsmith" / "demo-output"


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Typed:
    folder = tmp_path_factory.mktemp("newcomer")
    first, then = blocks("Try it", "sh")
    [program] = blocks("Use it", "python")
    asks, _on_kubernetes = blocks("Use it", "sh")
    (folder / "program.py").write_text(program.replace(MODEL, '"demo/tiny"') + "print(sampler.get_base_model())\n")
    # Another program may have the port of README; the demo wrote down a free one.
    then = then.replace(SERVES, f"{SERVES} --port ${{TINKER_BASE_URL##*:}}")
    answers = folder / "answers"
    typed_first = first.replace(URL, str(ROOT))
    script = [typed_first, then, "python ../../program.py", f"({asks}) > {answers}", "kill %1", "wait"]
    done = subprocess.run(
        ["bash", "-m", "-c", "\n".join(["set -e", STOPS_ITS_SERVER, *script])],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return Typed(folder, done.stdout, answers.read_text())


def environment(scratch: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES or name.startswith("PIP_")}
    uv = subprocess.run(
        [ROOT / "dev" / "scripts" / "find-uv"], capture_output=True, text=True, check=True
    ).stdout.strip()
    path = os.pathsep.join([str(Path(uv).parent), kept["PATH"]])
    # The model hub is not asked: a machine without one waits for it.
    return kept | {"PATH": path, "TMPDIR": str(scratch), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1"}


def test_the_demo_prints_the_output_in_the_readme(typed: Typed) -> None:
    """Numbers may differ between processors."""
    [shown] = blocks("Try it", "text")
    text = [without_numbers(line) for line in typed.text.splitlines()]
    assert [line for line in shown.splitlines() if without_numbers(line) not in text] == []
    before, after = typed.text.split("3. The same question again")
    assert "Pots, pans and lanterns." in after
    assert "Pots, pans and lanterns." not in before
    assert (typed.output / "first_steps.png").read_bytes().startswith(b"\x89PNG")
    made = {file.name for file in (typed.output / "adapter").iterdir()}
    assert made >= {"adapter_config.json", "adapter_model.safetensors"}


def without_numbers(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?(e[+-]\d+)?", "N", line.strip())


def test_warnings_of_other_packages_do_not_appear_on_the_screen(typed: Typed) -> None:
    assert re.findall(r".*Warning:.*", typed.text) == []


def test_it_leads_to_an_evaluated_and_promoted_adapter(typed: Typed) -> None:
    summary = json.loads((typed.output / "sft-run" / "summary.json").read_text())
    assert f"greeter stands for {summary['sampler']}" in typed.text
    header, *_, last = (typed.output / "evaluation" / "results.csv").read_text().splitlines()
    assert float(last.split(",")[header.split(",").index("mean")]) > 0.5


def test_the_program_and_the_openai_call_of_readme_run(typed: Typed) -> None:
    assert "demo/tiny" in typed.text.splitlines()
    assert json.loads(typed.answers)["choices"][0]["message"]["content"]
