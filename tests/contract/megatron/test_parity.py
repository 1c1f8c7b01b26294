"""The parity gate between the PEFT engine and Megatron's layers, on the CPU."""

from __future__ import annotations

import pytest
from support.engine.contract import parity
from support.tiny_models import TIED, tiny_directory
from tinsmith_trainer.torch_model.tiny_model import Family, TinyShape

ATOL = 1e-4

LLAMA_TIED: tuple[Family, TinyShape] = ("llama3", TIED)


def test_one_rank_of_either_engine_agrees_with_the_peft_engine_in_every_loss_and_kind_of_target() -> None:
    """A plain PEFT loop agrees, too. Half of the tolerance between each and the PEFT engine bounds any two of them."""
    parity("peft", "peft-reference", "nemo-rl", "miles", steps=6, atol=ATOL / 2)


def test_a_model_of_another_family_with_tied_embeddings_agrees_too() -> None:
    parity("peft", "nemo-rl", steps=3, atol=ATOL, model=tiny_directory(*LLAMA_TIED))


@pytest.mark.timeout(300)
def test_two_ranks_over_ray_agree_with_the_peft_engine_however_they_divide_the_work() -> None:
    """The ranks of the second division start a Ray of their own, in the process of the first."""
    divisions = (f"nemo-rl:ranks=2,{flags}" for flags in ("tensor-parallel=2", "distributed-optimizer=true"))
    parity("peft", *divisions, steps=3, atol=ATOL)
