"""The parity gate between the PEFT engine and Megatron's layers, on the CPU."""

from __future__ import annotations

import pytest
from support.engine.contract import parity
from support.tiny_models import TIED, tiny_directory
from tinsmith_trainer.torch_model.tiny_model import Family, TinyShape

ATOL = 1e-4

LLAMA_TIED: tuple[Family, TinyShape] = ("llama3", TIED)


def test_one_rank_of_either_engine_agrees_with_the_peft_engine_in_every_loss_and_kind_of_target() -> None:
    parity("peft", "nemo-rl", "miles", steps=6, atol=ATOL)


def test_a_model_of_another_family_with_tied_embeddings_agrees_too() -> None:
    parity("peft", "nemo-rl", steps=3, atol=ATOL, model=tiny_directory(*LLAMA_TIED))


def test_it_agrees_with_a_plain_peft_loop() -> None:
    parity("peft-reference", "nemo-rl", steps=3, atol=ATOL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flags", ["tensor-parallel=2", "distributed-optimizer=true"])
def test_two_ranks_over_ray_agree_with_the_peft_engine_however_they_divide_the_work(flags: str) -> None:
    parity("peft", f"nemo-rl:ranks=2,{flags}", steps=3, atol=ATOL)
