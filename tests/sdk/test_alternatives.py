"""The most likely alternative tokens, through the unmodified SDK."""

from __future__ import annotations

import pytest
import tinker
import torch
from support.client.sdk import adam, next_token_datum
from tinker import types

from .conftest import MODEL

TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]
PROMPT = types.ModelInput.from_ints(TOKENS)
ONE = types.SamplingParams(max_tokens=1, seed=7)


@pytest.fixture(params=["base", "adapter"])
def sampler(request: pytest.FixtureRequest, client: tinker.ServiceClient) -> tinker.SamplingClient:
    if request.param == "base":
        return client.create_sampling_client(base_model=MODEL).result()
    model = client.create_lora_training_client(MODEL, rank=8, seed=1).result()
    model.forward_backward([next_token_datum(TOKENS)], "cross_entropy")
    model.optim_step(adam(5e-3)).result()
    return model.save_weights_and_get_sampling_client().result()


def test_the_whole_vocabulary_of_a_prompt_position_sums_to_one(sampler: tinker.SamplingClient) -> None:
    answer = sampler.sample(PROMPT, 1, ONE, include_prompt_logprobs=True, topk_prompt_logprobs=512).result()
    rows = answer.topk_prompt_logprobs
    assert rows is not None
    assert rows[0] is None
    for row, token, logprob in zip(rows[1:], TOKENS[1:], (answer.prompt_logprobs or [])[1:], strict=True):
        assert row is not None
        assert sum(torch.tensor([value for _, value in row]).exp()) == pytest.approx(1, abs=1e-4)
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)
        assert dict(row)[token] == logprob


@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_named_tokens_come_back_in_the_layout_that_asked_for_them(sampler: tinker.SamplingClient, layout: str) -> None:
    ids = torch.full((len(TOKENS) - 1, 16), -1, dtype=torch.int64)
    ids[2, 1], ids[-1, 3] = TOKENS[3], 400
    dense = layout == "dense"
    target = types.TensorData.from_torch(ids) if dense else types.TensorData.from_torch_sparse(ids, pad_value=-1)
    answer = sampler.sample(
        PROMPT, 1, ONE, include_prompt_logprobs=True, topk_prompt_logprobs=512, target_prompt_logprobs=target
    ).result()
    found = answer.target_prompt_logprobs
    assert found is not None
    assert (found.sparse_col_indices is None) == dense
    logprobs = found.to_torch()
    assert logprobs.shape == ids.shape
    assert logprobs.count_nonzero() == 2
    assert float(logprobs[2, 1]) == (answer.prompt_logprobs or [])[3]
    assert float(logprobs[-1, 3]) == dict((answer.topk_prompt_logprobs or [])[-1] or [])[400]
