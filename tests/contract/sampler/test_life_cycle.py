"""The promises of every sampler about its adapters and caches, and about close and cancellation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.sampler.jobs import ask, ask_all, bits, job, prompt_of, random_adapter, submit
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.torch_model.loading import TorchModel

PROMPT = prompt_of(20)


# --- prefixes ---


def test_an_equal_prompt_is_computed_once(sampler: Sampler) -> None:
    prompt = prompt_of(70, seed=9)
    outcomes = ask_all(sampler, [job(prompt, seed=seed) for seed in range(6)])
    assert [outcome.prompt_cache_hit_tokens for outcome in outcomes] == [0, 69, 69, 69, 69, 69]
    assert {outcome.prompt_tokens for outcome in outcomes} == {70}
    assert all(outcome.started_at > 0 for outcome in outcomes)
    assert sampler.stats().prefilled_tokens == 69
    assert sampler.stats().prefix_hit_tokens == 5 * 69


def test_samples_of_a_job_share_its_prompt(sampler: Sampler) -> None:
    ask(sampler, job(prompt_of(50), num_samples=12))
    assert sampler.stats().prefilled_tokens == 49


def test_a_longer_prompt_reuses_whole_blocks(sampler: Sampler) -> None:
    ask(sampler, job(PROMPT))
    assert ask(sampler, job([*PROMPT, 1, 2, 3])).prompt_cache_hit_tokens == 16


def test_a_prefix_belongs_to_its_adapter_version(sampler: Sampler, model: TorchModel) -> None:
    sampler.load_adapter("v1", random_adapter(model, seed=1))
    ask(sampler, job(PROMPT))
    assert ask(sampler, job(PROMPT, adapter="v1")).prompt_cache_hit_tokens == 0
    sampler.drop_adapter("v1")
    sampler.load_adapter("v1", random_adapter(model, seed=2))
    assert ask(sampler, job(PROMPT, adapter="v1")).prompt_cache_hit_tokens == 0


@pytest.mark.parametrize("adapter", ["", "v1"], ids=["base model", "published adapter"])
def test_no_tenant_learns_whether_another_has_sent_a_prompt(sampler: Sampler, model: TorchModel, adapter: str) -> None:
    """The answer counts the tokens that were there already, and equal prompts that are under way are shared."""
    sampler.load_adapter("v1", random_adapter(model, seed=1))
    prompt = prompt_of(300)
    asked = [replace(job(prompt, adapter=adapter, num_samples=4), tenant=tenant) for tenant in ("ada", "bob")]
    together = ask_all(sampler, asked)
    later = ask(sampler, replace(job(prompt, adapter=adapter), tenant="eve"))
    assert [outcome.prompt_cache_hit_tokens for outcome in (*together, later)] == [0, 0, 0]
    assert ask(sampler, replace(asked[0], request_id="again")).prompt_cache_hit_tokens == 299


# --- adapters, and the end ---


def test_a_known_adapter_version_is_left_alone(sampler: Sampler, model: TorchModel) -> None:
    asked = job(PROMPT, adapter="v1")
    sampler.load_adapter("v1", random_adapter(model, seed=1))
    before = ask(sampler, asked)
    sampler.load_adapter("v1", random_adapter(model, seed=2))
    assert bits(ask(sampler, asked)) == bits(before)


def test_a_dropped_adapter_serves_the_jobs_it_has(sampler: Sampler, model: TorchModel) -> None:
    sampler.load_adapter("v1", random_adapter(model))
    expected = ask(sampler, job(PROMPT, adapter="v1", max_tokens=30))
    with model.shared_device.turns.held(Use.TRAINING):
        running = submit(sampler, job(PROMPT, adapter="v1", max_tokens=30))
        sampler.drop_adapter("v1")
        assert not sampler.has_adapter("v1")
        late = submit(sampler, job(PROMPT, adapter="v1"))
    np.testing.assert_array_equal(running.get().sequences[0].tokens, expected.sequences[0].tokens)
    assert isinstance(late.get().error, UserError)


def test_a_cancelled_job_ends_with_an_error_and_others_continue(sampler: Sampler, model: TorchModel) -> None:
    with model.shared_device.turns.held(Use.TRAINING):
        jobs = [job(prompt_of(20 + n), max_tokens=200, request_id=f"job-{n}") for n in range(20)]
        answers = [submit(sampler, asked) for asked in jobs]
        for cancelled in jobs[1:]:
            sampler.cancel(cancelled.request_id)
        sampler.cancel("unknown")
    assert all("cancelled" in str(answer.get().error) for answer in answers[1:])
    assert len(answers[0].get().sequences[0].tokens) == 200
    assert all(len(answer.outcomes) == 1 for answer in answers)


def test_close_ends_running_and_later_jobs_with_an_error(sampler: Sampler, model: TorchModel) -> None:
    with model.shared_device.turns.held(Use.TRAINING):
        running = [submit(sampler, job(PROMPT, max_tokens=900)) for _ in range(20)]
        closing = submit(sampler, job(PROMPT))
    sampler.close()
    sampler.close()
    late = submit(sampler, job(PROMPT))
    assert isinstance(late.get().error, ServerError)
    for answer in [*running, closing]:
        assert isinstance(answer.get().error, ServerError) or answer.get().sequences
        assert len(answer.outcomes) == 1
    assert isinstance(running[-1].get().error, ServerError)


def test_stats_count_completed_work(sampler: Sampler, model: TorchModel) -> None:
    with model.shared_device.turns.held(Use.TRAINING):
        answers = [submit(sampler, job(prompt_of(10, seed=n), max_tokens=4)) for n in range(20)]
        stats = sampler.stats()
        assert stats.active + stats.waiting == 20
    for answer in answers:
        answer.get()
    stats = sampler.stats()
    assert (stats.active, stats.waiting, stats.sampled_tokens, stats.prefilled_tokens) == (0, 0, 80, 180)
    assert stats.busy_seconds > 0


def test_a_job_for_an_adapter_that_is_not_loaded_gets_one_clear_user_error(sampler: Sampler) -> None:
    answer = submit(sampler, job(PROMPT, adapter="gone"))
    assert isinstance(answer.get().error, UserError)
    assert "Adapter gone is not loaded" in str(answer.get().error)
