"""The table as a terminal or a file of 80 columns gets it."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from tinsmith_trainer.parity.compare import Difference, Quantity, draw
from tinsmith_trainer.parity.plan import plan_steps

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "parity.md"
TITLE = "peft beside nemo-rl: Qwen3ForCausalLM, rank 8, seed 0"


def drawn() -> list[str]:
    """Of six steps, which have every loss twice."""
    plan = plan_steps(steps=6, rank=8, seed=0, vocab_size=64, max_length=64)
    differences = [Difference(step, quantity, 1.2e-07, "somewhere") for step in range(1, 7) for quantity in Quantity]
    out = io.StringIO()
    Console(file=out, width=80).print(draw(TITLE, plan, differences, 1e-4))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_no_word_is_folded_in_80_columns() -> None:
    lines = drawn()
    assert max(len(line) for line in lines) <= 80
    for word in ("before the first", "cross_entropy", "importance_sampling", "gradient norm", "1.2e-07"):
        assert any(f" {word} " in line for line in lines)
    assert len([line for line in lines if line.startswith("│")]) == 1 + 2 * 6


def test_the_page_shows_the_table_as_it_is_drawn() -> None:
    page = PAGE.read_text()
    without_numbers = [line for line in drawn() if "e-07" not in line and "0.0e+00" not in line]
    missing = [line for line in without_numbers if line.strip() not in page and "before the first" not in line]
    assert missing == []
