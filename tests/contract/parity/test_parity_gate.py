"""`tinsmith parity`: what it prints, and how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinsmith.cli import main

# An engine in numpy, which has the losses of the first step.
NUMPY = "support.engine.reference:build_reference"

# Of logprobs of about 6 after steps of Adam. Processors add in orders of their own: of four seeds three stay within
# 1e-5 on one with AVX-512, and one comes to 1.5e-5. What is wrong differs by a hundred times that.
ROUNDING = 3e-5


def parity(*arguments: object) -> int:
    with pytest.raises(SystemExit) as end:
        main(["parity", *(str(argument) for argument in arguments)])
    return int(end.value.code or 0)


def sides(one: str, other: str) -> list[str]:
    return ["--engine", one, "--engine", other]


def beside_numpy(engine: str, *arguments: object) -> int:
    return parity(*sides(NUMPY, engine), "--model", "reference", "--steps", 1, *arguments)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_the_peft_engine_agrees_with_a_plain_peft_loop_in_every_loss_on_a_model_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert parity(*sides("peft", "peft-reference"), "--steps", 3, "--rank", 4, "--atol", ROUNDING) == 0
    said = capsys.readouterr().out
    assert "peft and peft-reference: Qwen3ForCausalLM, rank 4, seed 0" in said
    assert f"Within {ROUNDING} in every step." in said
    for loss in ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo", "dro"):
        assert loss in said
    assert list(tmp_path.glob("tinsmith-parity-*")) == []


@pytest.mark.parametrize(
    ("engine", "sentence", "step"),
    [
        ("starts_elsewhere", "weights differ by", 0),
        ("steps_too_far", "weights differ by", 1),
        ("rounds_logprobs", "logprobs differ by", 1),
        ("forgets_the_first_call", "gradient norm differs by", 1),
    ],
)
def test_an_engine_that_differs_is_reported_by_quantity_step_and_place(
    engine: str, sentence: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beside_numpy(f"support.engine.wrong:{engine}") == 1
    said = capsys.readouterr().out
    (line,) = [line for line in said.splitlines() if line.startswith(sentence)]
    assert f" in step {step} (" in line
    assert line.endswith("more than 0.0001.")
    assert "Within" not in said


def test_an_engine_agrees_with_itself_to_the_bit() -> None:
    assert beside_numpy(NUMPY, "--atol", 0) == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--engine", NUMPY], "Give --engine at least twice"),
        (sides(NUMPY, "mine"), "knows no engine 'mine'"),
        (sides("peft:ranks", NUMPY), "'ranks' is not FLAG=VALUE"),
        (sides(NUMPY, "no_such_module:build"), "no_such_module:build is not an engine"),
        (sides("peft", NUMPY), "no/such/model"),
        ([*sides(NUMPY, NUMPY), "--steps", "0"], "--steps"),
        ([*sides(NUMPY, NUMPY), "--steps", "2"], "loss_fn 'ppo' is not known"),
        ([*sides(NUMPY, NUMPY), "--rank", "99"], "rank 99"),
    ],
)
def test_the_gate_exits_with_two_and_a_message_if_it_has_nothing_to_compare(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity("--model", "no/such/model", *arguments) == 2
    assert sentence in capsys.readouterr().err


def test_one_base_model_at_a_time_is_in_memory() -> None:
    assert parity(*sides(*["support.engine.wrong:build_only_one"] * 2), "--model", "reference", "--steps", 1) == 0
