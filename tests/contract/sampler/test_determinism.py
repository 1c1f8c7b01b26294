"""A job's result follows from the job, the weights and the seed: not from company, caches, rows or time.

Equality is by `repr`, so by bit. Samplers that only promise 1e-4 are compared by tolerance elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.sampler.jobs import ask, ask_all, bits, job, prompt_of, random_adapter
from tinsmith_trainer.sampling.base import SampleJob, Sampler
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import ALSO_ON_A_GPU

also_on_a_gpu = pytest.mark.parametrize("model", [*ALSO_ON_A_GPU, "llama3"], indirect=True, scope="module")
ADAPTERS = {"rank 4": (4, 0), "rank 6": (6, 1), "rank 20": (20, 2)}
KEYS = ["", *ADAPTERS]


def new_sampler(model: TorchModel, **changes: int) -> Sampler:
    sizes = {"max_rows": 8, "prefill_block_tokens": 16} | changes
    sampler = BuiltinSampler(model, BuiltinSamplerSettings(deterministic=True, **sizes))
    for key, (rank, seed) in ADAPTERS.items():
        sampler.load_adapter(key, random_adapter(model, rank=rank, seed=seed))
    return sampler


@pytest.fixture(scope="module", params=["qwen3", "llama3"])
def model(request: pytest.FixtureRequest, model_of: Callable[[str], TorchModel]) -> TorchModel:
    return model_of(request.param)


@pytest.fixture(scope="module")
def crowded(model: TorchModel) -> Iterator[Sampler]:
    """Return a sampler whose cache holds what earlier examples left there."""
    sampler = new_sampler(model)
    yield sampler
    sampler.close()


@pytest.fixture(scope="module")
def cold(model: TorchModel) -> Iterator[Sampler]:
    """Return a sampler without a cache that is given one job at a time."""
    sampler = new_sampler(model, prefix_cache_bytes=0)
    yield sampler
    sampler.close()


jobs = st.builds(
    job,
    st.builds(prompt_of, st.sampled_from([1, 2, 15, 16, 17, 40, 200, 250, 254, 255, 256, 300]), st.integers(0, 2)),
    adapter=st.sampled_from(KEYS),
    max_tokens=st.integers(0, 12),
    seed=st.integers(-(2**63), 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 1, 5, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.1]),
    num_samples=st.integers(1, 4),
    prompt_logprobs=st.booleans(),
    last_n=st.none() | st.integers(1, 60),
    # Seldom, since a prompt that is scored takes nothing from the cache.
    topk_prompt=st.sampled_from([0, 0, 0, 0, 5]),
    topk_sample=st.sampled_from([0, 0, 5]),
    alt_tokens=st.sampled_from([0, 0, 0, 0, 2]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(company=st.lists(jobs, min_size=1, max_size=10))
def test_company_and_caches_change_no_bit(cold: Sampler, crowded: Sampler, company: list[SampleJob]) -> None:
    together = ask_all(crowded, company)
    assert [bits(outcome) for outcome in together] == [bits(ask(cold, alone)) for alone in company]


def test_a_prefix_from_the_cache_changes_no_bit(cold: Sampler, crowded: Sampler) -> None:
    asked = job(prompt_of(90, seed=7), adapter="rank 6", max_tokens=20)
    first, second = ask(crowded, asked), ask(crowded, asked)
    assert first.prompt_cache_hit_tokens == 0
    assert second.prompt_cache_hit_tokens == 89
    assert bits(first) == bits(second) == bits(ask(cold, asked))


@also_on_a_gpu
def test_growing_past_an_extent_in_company_changes_no_bit(cold: Sampler, crowded: Sampler) -> None:
    growing = [job(prompt_of(200 + 10 * n, seed=n), adapter=KEYS[n % 2], max_tokens=120) for n in range(6)]
    together = ask_all(crowded, growing)
    assert [bits(outcome) for outcome in together] == [bits(ask(cold, alone)) for alone in growing]


@also_on_a_gpu
def test_more_samples_than_rows_are_the_samples_of_a_job_alone(cold: Sampler, crowded: Sampler) -> None:
    many = job(prompt_of(20), num_samples=20, max_tokens=5)
    busy = [job(prompt_of(30, seed=n), max_tokens=3 + n) for n in range(6)]
    assert bits(ask_all(crowded, [*busy, many])[-1]) == bits(ask(cold, many))


@pytest.mark.parametrize("rows_worth", [0, 8, 20], ids="memory for {} rows".format)
def test_scarce_memory_starves_no_job_and_changes_no_bit(model: TorchModel, rows_worth: int) -> None:
    """Batches have fewer rows, and open and close one after the other."""
    bytes_per_row = 256 * 2 * 2 * 2 * 16 * 4
    scarce = new_sampler(model, kv_cache_bytes=max(1, bytes_per_row * rows_worth))
    company = [job(prompt_of(240 + 4 * n, seed=n), adapter=KEYS[n % 4], max_tokens=40) for n in range(8)]
    together = ask_all(scarce, company)
    assert [bits(outcome) for outcome in together] == [bits(ask(scarce, alone)) for alone in company]
    scarce.close()
