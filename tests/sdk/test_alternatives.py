"""What else a model might have said, through the unmodified SDK."""

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


def test_each_sampled_token_comes_with_the_likeliest_ones(sampler: tinker.SamplingClient) -> None:
    greedy = types.SamplingParams(max_tokens=6, temperature=0, stop=[])
    for sequence in sampler.sample(PROMPT, 2, greedy, topk_sample_logprobs=3).result().sequences:
        rows = sequence.topk_logprobs or []
        assert [len(row or []) for row in rows] == [3] * 6
        assert [(row or [])[0] for row in rows] == list(zip(sequence.tokens, sequence.logprobs or [], strict=True))


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


def test_alternatives_are_drawn_for_every_position_after_the_first(sampler: tinker.SamplingClient) -> None:
    first, again = (sampler.sample(PROMPT, 1, ONE, prompt_alt_tokens_k=5).result().prompt_alt_tokens for _ in range(2))
    assert first is not None
    assert again is not None
    assert first.tokens.to_torch().shape == first.logprobs.to_torch().shape == (len(TOKENS) - 1, 5)
    assert first.tokens.to_torch().equal(again.tokens.to_torch()), "a seed repeats its draws"
    assert first.tokens.to_torch().unique().numel() > 5
    assert (first.logprobs.to_torch() < 0).all()


def test_of_the_last_tokens_only_the_others_are_none(sampler: tinker.SamplingClient) -> None:
    answer = sampler.sample(
        PROMPT, 1, ONE, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=3
    ).result()
    assert [row is None for row in answer.topk_prompt_logprobs or []] == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    ("asks", "words"),
    [
        ({"topk_prompt_logprobs": 513}, "topk_prompt_logprobs is 513; it must be 0 to 512"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2000}, "prompt_alt_tokens_k is 2000; it must be 0 to 1024"),
        ({"target_prompt_logprobs": types.TensorData.from_torch(torch.zeros(3, 2).long())}, r"has shape \[3, 2\]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_answered_fails_in_words(
    client: tinker.ServiceClient, asks: dict[str, object], words: str
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL).result()
    with pytest.raises(tinker.RequestFailedError, match=words) as failure:
        sampler.sample(PROMPT, 1, ONE, **asks).result()  # type: ignore[arg-type]
    assert failure.value.category == "user"
