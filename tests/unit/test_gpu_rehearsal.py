"""`make gpu-rehearsal`: the steps are those of a GPU's run that a CPU can take, and a failure tells what failed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_rehearsal
import gpu_rehearsal_steps as steps
import gpu_run
import gpu_wheels
import package_environment
import pytest
from gpu_rehearsal_steps import STEPS, Step
from support.engine.contract import ENGINES
from support.tiny_models import tiny_directory
from tinsmith_trainer.parity.sides import opened, options_of, parse_choice

REPORT = (
    '{"model": "tiny", "dtype": "float32", "rows": 8, "tokens": 512, "bare": {"tokens_per_second": 100.0, "error": %s},'
    ' "engine": {"tokens_per_second": 123.4, "peak_gb": null, "error": null}, "sampled_tokens_per_second": 5.0}'
)


def values_after(option: str) -> Iterator[str]:
    """Yield the option's values in all steps."""
    for step in STEPS:
        yield from (value for name, value in zip(step.arguments, step.arguments[1:], strict=False) if name == option)


def print_step(program: str, least: int = 1) -> Step:
    return Step("a step", ("-c", program), steps.passed, least, "passed")


def test_collection_is_of_the_tests_that_a_run_on_a_gpu_asks_for() -> None:
    [collection] = [step for step in STEPS if "--collect-only" in step.arguments]
    assert collection.arguments[-len(gpu_run.TESTS) :] == gpu_run.TESTS
    assert "gpu" in values_after("-m")


def test_each_choice_of_the_contract_is_an_engine_under_it() -> None:
    choices = list(values_after("-k"))
    assert choices == ["like-gpu", "nemo-rl-in-process"]
    assert all(any(choice in name for name in ENGINES) for choice in choices)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_takes_the_gpus_path_is_compared_and_measured_in_both_types(dtype: str) -> None:
    [like_gpu] = [text for text in values_after("--engine") if "like_gpu" in text and text.endswith(dtype)]
    choice = parse_choice(like_gpu)
    with opened(choice, options_of(choice, model=str(tiny_directory()), rank=4)) as engine:
        assert not engine.capabilities().batch_invariant
    assert dtype in values_after("--dtype")


def test_each_side_of_a_comparison_has_flags_that_parity_knows() -> None:
    for text in values_after("--engine"):
        assert options_of(parse_choice(text), model="any", rank=4).device == "cpu"


@pytest.mark.parametrize(
    ("count", "output", "expected"),
    [
        (steps.collected, "219/774 tests collected (555 deselected) in 9.36s", 219),
        (steps.collected, "1 test collected in 0.01s", 1),
        (steps.collected, "no tests ran", 0),
        (steps.passed, "114 passed, 10 skipped, 609 deselected in 46.07s", 114),
        (steps.passed, "10 skipped in 1.0s", 0),
        (steps.agreeing, "a table\nWithin 0.02 in every step.\nanother\nWithin 0.02 in every step.\n", 2),
        (steps.agreeing, "More than 0.02 in step 3.", 0),
        (steps.tokens_per_second, REPORT % "null", 123),
        (steps.tokens_per_second, REPORT % '"out of memory"', 0),
        (steps.tokens_per_second, "no report", 0),
    ],
)
def test_a_step_is_counted_by_what_it_prints(count: Callable[[str], int], output: str, expected: int) -> None:
    assert count(output) == expected


@pytest.mark.parametrize(
    ("program", "least", "result"),
    [
        ("print('3 passed')", 3, "3 passed"),
        ("print('2 passed')", 3, "failed: 2 passed, and at least 3 are expected\n2 passed"),
        ("import sys; print('3 passed'); sys.exit('it broke')", 3, "failed with status 1\n3 passed\nit broke"),
    ],
    ids=["passed", "too few", "failed"],
)
def test_a_step_prints_one_line_and_its_output_where_it_fails(
    capsys: pytest.CaptureFixture[str], program: str, least: int, result: str
) -> None:
    assert steps.run_step(print_step(program, least), ()) is (not result.startswith("failed"))
    said = capsys.readouterr().out
    assert said.startswith("a step ")
    assert said.partition(" s  ")[2].strip() == result


def test_a_step_without_an_end_fails_with_what_it_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "STEP_SECONDS", 1.0)
    assert not steps.run_step(print_step("import time; print('so far', flush=True); time.sleep(600)"), ())
    assert capsys.readouterr().out.endswith("failed: no end within 1 s\nso far\n\n")


def test_a_step_finds_the_wheels_before_all_else_but_the_projects_sources(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "brought_along.py").write_text("COUNT = 7")
    program = "import brought_along, support.engine, tinsmith_trainer; print(brought_along.COUNT, 'passed')"
    assert steps.run_step(print_step(program), [str(tmp_path)])
    assert "7 passed" in capsys.readouterr().out


def test_the_wheels_are_for_the_python_of_the_image() -> None:
    assert package_environment.GPU_LOOKALIKE.python == gpu_wheels.PYTHON_VERSION


def test_the_rehearsal_sees_no_gpu_and_none_of_the_callers_packages() -> None:
    variables = gpu_rehearsal.environment({"PYTHONPATH": "of-the-caller", "PATH": "/bin"}, "libraries")
    assert variables["PYTHONPATH"] == variables["CUDA_VISIBLE_DEVICES"] == ""
    assert (variables["PATH"], variables["LD_LIBRARY_PATH"]) == ("/bin", "libraries")


def test_an_environment_that_cannot_be_made_ends_the_rehearsal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TINSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(package_environment, "FIND_PYTHON", "/bin/false")
    package_environment.interpreter.cache_clear()
    try:
        assert gpu_rehearsal.main([]) == 1
    finally:
        package_environment.interpreter.cache_clear()
    assert "gpu-lookalike.txt is missing" in capsys.readouterr().err


def test_a_python_without_any_package_gets_as_far_as_its_wheels(tmp_path: Path) -> None:
    bare = [sys.executable, "-E", "-S", steps.__file__, "--wheels", str(tmp_path)]
    done = subprocess.run(bare, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert (done.returncode, done.stderr.startswith(f"gpu-rehearsal: {tmp_path} holds no wheels")) == (1, True)
