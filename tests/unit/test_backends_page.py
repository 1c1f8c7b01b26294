"""explanation/backends.md says what the code, the CRD and the recorded runs say: a choice of hardware is made by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gpu_reference
import pytest
import yaml
from tinsmith_trainer.engines.megatron.flags import ENGINES as RANKS_ENGINES
from tinsmith_trainer.options import UsageError, parse_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "explanation" / "backends.md").read_text()
PROSE = " ".join(PAGE.split())
CRD = yaml.safe_load((ROOT / "crds" / "tinsmith.dev_trainingsessions.yaml").read_text())


def spec_of(field: str) -> dict[str, Any]:
    """Return the schema of a field of TrainingSession's spec by its path, or of the whole spec."""
    found = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in filter(None, field.split(".")):
        found = found["properties"][name]
    return found  # type: ignore[no-any-return]


def test_it_says_that_only_peft_ran_on_a_gpu_while_that_is_so() -> None:
    others = ("tests/gpu/test_nemo_rl.py", "tests/gpu/test_miles.py")
    have_run = any("run" in entry for entry in gpu_reference.entries() if entry["name"].startswith(others))
    assert ("Only `peft` has run on a GPU" in PROSE) == (not have_run)
    assert ("- NeMo RL and Miles on GPUs, and any engine on several GPUs." in PROSE) == (not have_run)


def test_its_limits_are_those_of_the_crd() -> None:
    nodes, slots, rank = spec_of("parallelism.nodes"), spec_of("adapters.slots"), spec_of("adapters.maxRank")
    assert PROSE.count(f"GPUs of {nodes['minimum']} to {nodes['maximum']} nodes") == 2
    assert f"({slots['minimum']} to {slots['maximum']}, {slots['default']} by default)" in PROSE
    assert f"`maxRank` is {rank['default']} by default and {rank['maximum']} at most" in PROSE


@pytest.mark.parametrize("engine", RANKS_ENGINES)
@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--quantization", "4bit"], "--quantization is for peft"),
        (
            ["--ranks", "2", "--context-parallel", "2"],
            "--context-parallel( is not supported by the engine miles| needs GPUs)",
        ),
        (["--gpus-per-node", "8"], "no memory for a sampler"),
    ],
)
def test_engines_on_ranks_refuse_everything_that_the_page_calls_unsupported(
    engine: str, flags: list[str], refusal: str
) -> None:
    """Few bits, a sequence divided on CPUs, samples during training on GPUs."""
    worker = ["--model", "m", "--socket", "s", "--volume", "v", "--checkpoint-root", "file:///c", "--engine", engine]
    with pytest.raises(UsageError, match=refusal):
        parse_options([*worker, *flags])
