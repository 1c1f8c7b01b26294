from __future__ import annotations

import pytest
from tinsmith_trainer.options import UsageError
from tinsmith_trainer.parity.sides import options_of, parse_choice


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        ("peft", "peft", []),
        ("peft:dtype=bfloat16", "peft", ["--dtype", "bfloat16"]),
        ("peft:device=cpu, max-sequence-length=64", "peft", ["--device", "cpu", "--max-sequence-length", "64"]),
        ("module:factory", "module:factory", []),
        ("module:factory:adapter-slots=2", "module:factory", ["--adapter-slots", "2"]),
        ("peft:map-stable-reinforce=false", "peft", ["--no-map-stable-reinforce"]),
        ("peft:map-stable-reinforce=true", "peft", ["--map-stable-reinforce"]),
    ],
)
def test_an_engine_is_named_with_flags_of_the_worker_behind_a_colon(text: str, name: str, flags: list[str]) -> None:
    choice = parse_choice(text)
    assert (choice.name, list(choice.flags)) == (name, flags)


@pytest.mark.parametrize("flag", ["model", "volume", "socket", "checkpoint-root", "engine", "rank", "no-sampling"])
def test_a_flag_of_another_side_is_refused_with_the_valid_ones(flag: str) -> None:
    sentence = (
        rf"^peft:{flag}=x: {flag} cannot be set for a side; allowed are ranks, .*dtype, .*model-revision, recompute\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        parse_choice(f"peft:{flag}=x")


def test_flags_reach_the_options_that_a_worker_would_have() -> None:
    options = options_of(parse_choice("peft:dtype=float32,adapter-slots=3"), model="m", rank=24)
    assert (options.engine, options.model, options.dtype, options.adapter_slots) == ("peft", "m", "float32", 3)
    assert (options.max_rank, options.sampling) == (24, False)


def test_the_reference_is_placed_by_the_same_flags() -> None:
    assert options_of(parse_choice("peft-reference:device=cpu"), model="m", rank=8).device == "cpu"


@pytest.mark.parametrize("text", ["mine", "peft:ranks=2", "peft:adapter-slots=many"])
def test_a_setting_that_a_worker_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        options_of(parse_choice(text), model="m", rank=8)
