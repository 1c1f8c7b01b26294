"""explanation/backends.md says what the code, the CRD and the recorded runs say: a choice of hardware is made by it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_reference
import pytest
import yaml
from nemo_rl_sizing import GIB, GPU_GIB, MODELS, SLOT_BYTES, Sizes, smallest
from tinsmith_trainer.engines.megatron.flags import ENGINES as RANKS_ENGINES
from tinsmith_trainer.engines.megatron.model.ranked_model import GROUPED_ROW_FLOATS
from tinsmith_trainer.options import KNOWN_ENGINES, UsageError, parse_options

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "explanation" / "backends.md").read_text()
PROSE = " ".join(PAGE.split())
ZOO = (DOCS / "reference" / "models.md").read_text()
ZOO_COLUMNS = 7
RANK, SHORT, LONG = 32, 8192, 32768
CRD = yaml.safe_load((ROOT / "crds" / "tinsmith.dev_trainingsessions.yaml").read_text())
RUNS = {page: tomllib.loads((DOCS / f"{page}-runs.toml").read_text())["run"] for page in ("nemo-rl", "miles")}

BENCHMARKS = "reference/benchmarks.md"
BENCHMARKS = "reference/benchmarks.md"
QUOTED = [  # a figure of the page, and the row of another page that it is from
    ("0.82 times with AVX-512", BENCHMARKS, r"\| 3 M parameters \| 223 ms \| 183 ms \| \*\*0\.82\*\*"),
    ("1.02 times with AVX2", BENCHMARKS, r"\| 3 M parameters, AVX2 alone, .* \*\*1\.02\*\*"),
    ("1.5, 2.7, 1.7 to 3.1 times", BENCHMARKS, r"\*\*1\.5\*\* (?s:.*)\*\*2\.7\*\* (?s:.*)\*\*1\.7 to 3\.1\*\*"),
    ("2.76 times the rate", BENCHMARKS, r"\| 8 adapters of 1 x 16 at once .* \*\*2\.76\*\*"),
    ("1.13 times as long", BENCHMARKS, r"\| beside the PEFT engine .* \*\*1\.13\*\*"),
    ("1.04 times as long", BENCHMARKS, r"\| another adapter in each step .* \*\*1\.04\*\*"),
    ("1.05 times as long", BENCHMARKS, r"\| a rank behind Ray.* \*\*1\.05\*\*"),
    ("0.72 times as long", BENCHMARKS, r"\| two ranks that share the data.* \*\*0\.72\*\*"),
    ("5 to 35 % more time", "how-to/nemo-rl.md", r"So\s5\sto\s35\s%\smore\stime"),
    ("0.5 MB of a token of Qwen3-8B instead of 6.6", "how-to/gpu.md", r"6\.6 MB a token(?s:.*)Of such a token 0\.5 MB"),
    ("room for 12 adapters of rank 32", "how-to/gpu.md", r"12\sof\sthem\swith\sgradients\sand\smoments"),
    ("KubeRay 1.6", "explanation/operator.md", r"KubeRay\s1\.6\sor\snewer"),
]


def spec_of(field: str) -> dict[str, Any]:
    """The schema of a field of TrainingSession's spec, by its path; without one, of all of it."""
    found = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    for name in filter(None, field.split(".")):
        found = found["properties"][name]
    return found  # type: ignore[no-any-return]


def deviations(page: str, what: str) -> Iterator[float]:
    """By how much logprobs differed in the runs that say so of themselves."""
    for run in RUNS[page]:
        if " / " not in run["deviation"] or (what == "bfloat16") != ("bfloat16" in run["what"]):
            continue
        yield float(run["deviation"].split(" / ")[0])


def tokens_row(sizes: Sizes) -> str:
    counts = [layout.gpus for tokens in (SHORT, LONG) if (layout := smallest(sizes, RANK, tokens))]
    slot = SLOT_BYTES * sizes.adapter_parameters(RANK) / GIB
    return f"| {sizes.name} | {counts[0]} | {counts[1]} | {slot:.1f} |"


def test_every_engine_has_a_column_and_there_is_no_other() -> None:
    columns = re.search(r"^\| \| (`peft`.*) \|$", PAGE, re.MULTILINE)
    assert columns is not None
    named = {name.strip("`") for name in columns[1].split(" | ")}
    assert set(KNOWN_ENGINES["worker"]) == set(spec_of("engine")["enum"]) == named


def test_it_says_that_no_test_ran_on_a_gpu_only_while_that_is_so() -> None:
    has_run = any("run" in entry for kind in ("test", "benchmark") for entry in gpu_reference.entries(kind))
    assert ("**No engine has run on a GPU**" in PROSE) == (not has_run)
    assert ("**On a GPU: nothing.**" in PROSE) == (not has_run)


@pytest.mark.parametrize("sizes", MODELS, ids=lambda sizes: sizes.name)
def test_how_many_gpus_a_model_needs_is_what_the_formula_says(sizes: Sizes) -> None:
    assert tokens_row(sizes) in PROSE
    assert f"GPUs of {GPU_GIB} GiB" in PROSE


def test_its_limits_are_those_of_the_crd() -> None:
    nodes, slots, rank = spec_of("parallelism.nodes"), spec_of("adapters.slots"), spec_of("adapters.maxRank")
    assert PROSE.count(f"GPUs of {nodes['minimum']} to {nodes['maximum']} nodes") == 2
    assert f"({slots['minimum']} to {slots['maximum']}, {slots['default']} by default)" in PROSE
    assert f"`maxRank` is {rank['default']} by default and {rank['maximum']} at most" in PROSE


@pytest.mark.parametrize(("shared", "dimension"), [("sequences", "context"), ("experts", "expert")])
def test_what_miles_does_not_divide_the_crd_refuses(shared: str, dimension: str) -> None:
    """And what it divides is not refused."""
    row = re.search(r"^\| divides \| [^|]* \| ([^|]*) \| ([^|]*) \|$", PAGE, re.MULTILINE)
    assert row is not None
    rules = [rule["rule"] for rule in spec_of("")["x-kubernetes-validations"]]
    refused = any("!= 'miles'" in rule and f"parallelism.{dimension} == 1" in rule for rule in rules)
    assert shared in row[1]
    assert (shared in row[2]) == (not refused)


def test_what_experts_ask_of_the_highest_rank_is_what_ranks_check() -> None:
    assert f"a `maxRank` that is a multiple of {GROUPED_ROW_FLOATS}" in PROSE


def test_families_that_train_are_as_many_as_the_zoo_found() -> None:
    lines = [line.split(" | ") for line in ZOO.splitlines() if line.startswith("| `")]
    families = [line for line in lines if len(line) == ZOO_COLUMNS]
    trained = [line for line in families if line[3] != "refused"]
    assert f"[{len(trained)} of {len(families)} families]" in PROSE


def test_differences_between_engines_are_those_of_the_recorded_runs() -> None:
    for page in RUNS:
        float32 = list(deviations(page, "float32"))
        assert re.search(rf"{len(float32)} runs of float32[^|]*\| {max(float32):.1e} at most \| \[{page}\.md\]", PROSE)
        assert re.search(rf"\| {max(deviations(page, 'bfloat16')):.1e} \| \[{page}\.md\]", PROSE)


@pytest.mark.parametrize(("figure", "page", "row"), QUOTED, ids=[figure for figure, _, _ in QUOTED])
def test_a_figure_is_still_what_its_page_has(figure: str, page: str, row: str) -> None:
    assert figure in PROSE
    assert re.search(row, " ".join((DOCS / page).read_text().split()))  # wherever its lines break


@pytest.mark.parametrize("engine", RANKS_ENGINES)
@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--quantization", "4bit"], "--quantization is for peft"),
        (["--ranks", "2", "--context-parallel", "2"], "--context-parallel(: the engine miles has no| needs GPUs)"),
        (["--gpus-per-node", "8"], "no room for a sampler beside them"),
    ],
)
def test_what_it_says_engines_on_ranks_do_not_do_they_refuse(engine: str, flags: list[str], refusal: str) -> None:
    """Few bits, a sequence divided on CPUs, samples beside the training on GPUs."""
    worker = ["--model", "m", "--socket", "s", "--volume", "v", "--checkpoint-root", "file:///c", "--engine", engine]
    with pytest.raises(UsageError, match=refusal):
        parse_options([*worker, *flags])
