"""A datum that no packed microbatch could hold is refused before any rank sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.engine.datums import VOCAB_SIZE, sft_datum
from tinsmith_trainer.engines.base import LossSpec
from tinsmith_trainer.engines.batching import check_tokens
from tinsmith_trainer.engines.losses import prepare_loss
from tinsmith_trainer.engines.megatron.batch import INPUT_IDS, encode
from tinsmith_trainer.engines.megatron.model.ranked_model import RankedModel
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.engines.megatron.sharding import length_multiple
from tinsmith_trainer.engines.nemo_rl.policy_config import policy_config
from tinsmith_trainer.errors import UserError


@given(
    st.integers(1, 300),
    st.integers(1, 600),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)
def test_a_microbatch_holds_the_longest_datum_that_is_taken_and_a_longer_one_is_refused(
    longest: int, token_budget: int, tensor: int, context: int
) -> None:
    parallelism = Parallelism(tensor * context, tensor=tensor, context=context)
    model = RankedModel(Path("model"), VOCAB_SIZE, 4, False, max_rank=8, max_tokens=longest, token_budget=token_budget)
    packing = policy_config(model, parallelism)["sequence_packing"]

    datum = sft_datum(longest)
    check_tokens([datum], vocab_size=VOCAB_SIZE, max_length=longest)
    arrays = prepare_loss(LossSpec("cross_entropy"), [datum]).arrays
    row = encode([datum], arrays, multiple_of=length_multiple(tensor=tensor, context=context))[INPUT_IDS]
    assert row.shape[1] <= packing["train_mb_tokens"]
    with pytest.raises(UserError, match=f"the limit of this model is {longest}"):
        check_tokens([sft_datum(longest + 1)], vocab_size=VOCAB_SIZE, max_length=longest)
