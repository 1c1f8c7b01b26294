"""`make gpu-rehearsal`: the steps are those of a GPU's run that a CPU can take, and a failure tells what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_rehearsal
import gpu_rehearsal_steps as steps
import gpu_run
import package_environment
import pytest
from gpu_rehearsal_steps import STEPS

REPORT = (
    '{"model": "tiny", "dtype": "float32", "rows": 8, "tokens": 512, "bare": {"tokens_per_second": 100.0, "error": %s},'
    ' "engine": {"tokens_per_second": 123.4, "peak_gb": null, "error": null}, "sampled_tokens_per_second": 5.0}'
)
CALLS_REPORT = (
    '{"model": "tiny", "calls": [{"name": "8 ragged", "tokens": 1029, "forwards": 2, "seconds": 0.2, "peak_gb": null}],'
    ' "decodes": [{"name": "decode of 1 rows", "rows": 1, "adapters": 1, "step_seconds": 0.01,'
    ' "tokens_per_second": 84.0, "calls_per_second": null}]}'
)


def values_after(option: str) -> Iterator[str]:
    """Yield the option's values in all steps."""
    for step in STEPS:
        yield from (value for name, value in zip(step.arguments, step.arguments[1:], strict=False) if name == option)


def test_collection_is_of_the_tests_that_a_run_on_a_gpu_asks_for() -> None:
    [collection] = [step for step in STEPS if "--collect-only" in step.arguments]
    assert collection.arguments[-len(gpu_run.TESTS) :] == gpu_run.TESTS
    assert "gpu" in values_after("-m")


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
        (steps.calls_and_decodes, CALLS_REPORT, 2),
        (steps.calls_and_decodes, "no report", 0),
    ],
)
def test_a_step_is_counted_by_its_output(count: Callable[[str], int], output: str, expected: int) -> None:
    assert count(output) == expected


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
