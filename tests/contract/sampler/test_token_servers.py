"""The promises of a sampler that uses vLLM or SGLang, tested with stand-ins.

Their logprobs, adapters and prompt logprobs are compared with plain transformers, as the built-in sampler's are.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.sampler.jobs import ask, ask_all, bits, full_logprobs, job, plain_model, prompt_of, random_adapter, submit
from support.token_server.look_alikes import StandInHand
from support.token_server.shared import ServerHand, SharedServer
from support.waiting import until
from tinsmith_trainer.errors import SamplerClosed, ServerError, UserError
from tinsmith_trainer.sampling.base import DrawnToken, Sampler
from tinsmith_trainer.sampling.token_server.adapters import AdapterFolders, ServedAdapter
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import EVERY_TOKEN_SERVER, TOKEN_SERVERS, shared_server

PROMPT = prompt_of(20)
TOLERANCE = 1e-4
# A real one can be made to wait with samples alone.
stand_ins_alone = pytest.mark.parametrize("server", TOKEN_SERVERS, indirect=True)


@pytest.fixture(params=EVERY_TOKEN_SERVER)
def server(request: pytest.FixtureRequest) -> SharedServer:
    return shared_server(request, request.param)


@pytest.fixture
def sampler(server: SharedServer) -> Iterator[Sampler]:
    sampler = server.sampler()
    yield sampler
    sampler.close()


@pytest.fixture
def hand(server: SharedServer) -> ServerHand:
    return server.hand


# --- what it computes ---


@pytest.mark.parametrize("temperature", [0.0, 0.7, 2.0])
def test_logprobs_are_those_at_temperature_one_for_any_sampling_temperature(
    sampler: Sampler, model: TorchModel, temperature: float
) -> None:
    sequence = ask(sampler, job(PROMPT, max_tokens=20, temperature=temperature, top_k=5, top_p=0.9)).sequences[0]
    expected = full_logprobs(plain_model(model), [*PROMPT, *sequence.tokens])[19:]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=TOLERANCE)


def test_the_tokens_of_a_sample_are_told_one_by_one_up_to_its_end(sampler: Sampler, model: TorchModel) -> None:
    asked = job(PROMPT, num_samples=2, max_tokens=20, temperature=1.0, seed=5, topk_sample=2)
    whole = ask(sampler, asked)
    text = model.tokenizer.decode(whole.sequences[0].tokens[:3].tolist(), skip_special_tokens=False)
    for stops, expected in (((), whole), ((text[-1:],), None)):
        heard: list[list[DrawnToken]] = [[], []]
        listened = replace(
            asked,
            params=replace(asked.params, stop_strings=stops),
            drawn=lambda index, token, heard=heard: heard[index].append(token),
        )
        told = ask(sampler, listened)
        assert expected is None or bits(told) == bits(expected)
        for tokens, sequence in zip(heard, told.sequences, strict=True):
            assert [each.token for each in tokens] == sequence.tokens.tolist()
            assert [each.logprob for each in tokens] == pytest.approx(sequence.logprobs.tolist())
            rows = [each.top_logprobs.token_ids[0].tolist() for each in tokens if each.top_logprobs is not None]
            assert sequence.topk_logprobs is not None
            assert rows == sequence.topk_logprobs.token_ids.tolist()


def test_samples_without_a_seed_are_drawn_independently(sampler: Sampler) -> None:
    asked = job(PROMPT, num_samples=4, max_tokens=8, temperature=2.0, seed=None, stop_tokens=())
    drawn = [
        tuple(sequence.tokens)
        for outcome in (ask(sampler, asked), ask(sampler, asked))
        for sequence in outcome.sequences
    ]
    assert len(set(drawn)) == 8


@pytest.mark.parametrize(
    ("rank", "families"),
    [(8, ("attn", "mlp", "unembed")), (5, ("attn",)), (40, ("mlp", "unembed"))],
    ids=["all", "attention", "mlp and unembed"],
)
def test_an_adapter_gives_the_logprobs_of_merged_weights(
    sampler: Sampler, model: TorchModel, rank: int, families: tuple[str, ...]
) -> None:
    state = random_adapter(model, rank=rank, families=families)
    sampler.load_adapter("tuned", state)
    outcome = ask(sampler, job(PROMPT, adapter="tuned", prompt_logprobs=True))
    tokens = [*PROMPT, *outcome.sequences[0].tokens]
    expected = full_logprobs(plain_model(model, state), tokens)
    assert outcome.prompt_logprobs is not None
    found = [*outcome.prompt_logprobs[1:], *outcome.sequences[0].logprobs]
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    assert not np.allclose(found, full_logprobs(plain_model(model), tokens), atol=0.01)


def test_adapters_of_jobs_at_the_same_time_do_not_mix(sampler: Sampler, model: TorchModel) -> None:
    states = {f"adapter-{n}": random_adapter(model, seed=n, rank=4 + n) for n in range(2)}
    for key, state in states.items():
        sampler.load_adapter(key, state)
    jobs = [job(prompt_of(20, seed=n), adapter=key) for n, key in enumerate(["", *states, *states, ""])]
    for asked, outcome in zip(jobs, ask_all(sampler, jobs), strict=True):
        plain = plain_model(model, states.get(asked.adapter_key))
        expected = full_logprobs(plain, [*asked.prompt, *outcome.sequences[0].tokens])[19:]
        np.testing.assert_allclose(outcome.sequences[0].logprobs, expected, atol=TOLERANCE)


def test_sampling_continues_past_an_end_that_was_not_requested(sampler: Sampler, model: TorchModel) -> None:
    """A list of stop tokens replaces the model's own, and the sequence has its logprobs all along."""
    rare = 500
    assert rare not in model.eos_token_ids
    asked = job(PROMPT, num_samples=4, max_tokens=900, temperature=2.0, seed=11, stop_tokens=(rare,))
    sequences = ask(sampler, asked).sequences
    assert any(set(sequence.tokens[:-1]) & set(model.eos_token_ids) for sequence in sequences)
    for sequence in sequences:
        assert (sequence.tokens[-1] == rare) == sequence.stopped
        expected = full_logprobs(plain_model(model), [*PROMPT, *sequence.tokens])[19:]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=TOLERANCE)


def test_a_stop_in_the_last_place_is_a_stop_under_any_name_of_the_server(sampler: Sampler) -> None:
    said = ask(sampler, job(PROMPT, max_tokens=10, temperature=0.0)).sequences[0].tokens.tolist()
    place = next(place for place in range(9, -1, -1) if said.index(said[place]) == place)
    asked = job(PROMPT, max_tokens=place + 1, temperature=0.0, stop_tokens=(said[place],))
    sequence = ask(sampler, asked).sequences[0]
    assert (sequence.tokens.tolist(), sequence.stopped) == (said[: place + 1], True)


def test_cached_tokens_of_a_prompt_are_counted(sampler: Sampler) -> None:
    prompt = prompt_of(70, seed=9)
    first, second = ask(sampler, job(prompt, num_samples=3, max_tokens=4)), ask(sampler, job(prompt, max_tokens=4))
    assert second.prompt_cache_hit_tokens == 64
    assert [outcome.prompt_tokens for outcome in (first, second)] == [70, 70]
    assert 0 < first.started_at <= second.started_at
    stats = sampler.stats()
    assert stats.sampled_tokens == 16
    assert stats.prefix_hit_tokens == first.prompt_cache_hit_tokens + 64
    assert stats.prefilled_tokens == 140 - stats.prefix_hit_tokens
    assert stats.busy_seconds > 0


def test_no_tenant_learns_whether_another_has_sent_a_prompt(sampler: Sampler) -> None:
    prompt = prompt_of(70, seed=10)
    asked = [replace(job(prompt, max_tokens=4), tenant=tenant) for tenant in ("ada", "bob", "")]
    assert [ask(sampler, one).prompt_cache_hit_tokens for one in asked] == [0, 0, 0]
    assert ask(sampler, replace(asked[0], request_id="again")).prompt_cache_hit_tokens == 64


# --- adapters ---


def test_a_version_that_comes_back_under_its_key_is_another_one_to_the_server(
    sampler: Sampler, model: TorchModel
) -> None:
    sampler.load_adapter("v1", random_adapter(model, seed=1))
    ask(sampler, job(PROMPT, adapter="v1"))
    sampler.drop_adapter("v1")
    state = random_adapter(model, seed=2)
    sampler.load_adapter("v1", state)
    outcome = ask(sampler, job(PROMPT, adapter="v1"))
    assert outcome.prompt_cache_hit_tokens == 0
    expected = full_logprobs(plain_model(model, state), [*PROMPT, *outcome.sequences[0].tokens])[19:]
    np.testing.assert_allclose(outcome.sequences[0].logprobs, expected, atol=TOLERANCE)


def test_a_dropped_adapter_serves_the_jobs_it_has_and_leaves_the_server_after_them(
    sampler: Sampler, model: TorchModel, hand: ServerHand
) -> None:
    others = set(hand.state()["adapters"])
    sampler.load_adapter("v1", random_adapter(model))
    expected = ask(sampler, job(PROMPT, adapter="v1", max_tokens=30))
    with hand.held():
        running = submit(sampler, job(PROMPT, adapter="v1", max_tokens=30))
        until(lambda: hand.state()["running"] == 1)
        sampler.drop_adapter("v1")
        assert not sampler.has_adapter("v1")
        late = submit(sampler, job(PROMPT, adapter="v1"))
        assert isinstance(late.get().error, UserError)
        assert len(set(hand.state()["adapters"]) - others) == 1
    assert bits(replace(running.get(), prompt_cache_hit_tokens=0)) == bits(expected)
    until(lambda: set(hand.state()["adapters"]) <= others)


def test_a_refused_adapter_is_a_user_error_with_the_message_of_the_server(sampler: Sampler, model: TorchModel) -> None:
    with pytest.raises(UserError, match=r"Adapter wide was not loaded.* status [45]00: .*LoRA rank 65 is greater"):
        sampler.load_adapter("wide", random_adapter(model, rank=65))
    assert not sampler.has_adapter("wide")


def test_an_adapter_can_be_loaded_again_after_its_files_were_lost_before_the_server_read_them(
    sampler: Sampler, model: TorchModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = AdapterFolders.write

    def lost(folders: AdapterFolders, *arguments: Any) -> ServedAdapter:
        adapter = write(folders, *arguments)
        folders.remove(adapter)
        return adapter

    with monkeypatch.context() as emptied:
        emptied.setattr(AdapterFolders, "write", lost)
        with pytest.raises(ServerError, match=r"Adapter v1 was not loaded: .* is gone.*send the request again"):
            sampler.load_adapter("v1", random_adapter(model))
    assert not sampler.has_adapter("v1")
    sampler.load_adapter("v1", random_adapter(model))
    assert ask(sampler, job(PROMPT, adapter="v1")).sequences


# --- the end ---


def test_a_cancelled_job_leaves_the_server_and_others_continue(sampler: Sampler, hand: ServerHand) -> None:
    with hand.held():
        jobs = [job(prompt_of(20 + n), max_tokens=50, num_samples=2) for n in range(4)]
        answers = [submit(sampler, asked) for asked in jobs]
        until(lambda: hand.state()["running"] == 8)
        for cancelled in jobs[1:]:
            sampler.cancel(cancelled.request_id)
        sampler.cancel("unknown")
        assert all("cancelled" in str(answer.get().error) for answer in answers[1:])
        until(lambda: hand.state()["running"] == 2)
    assert [len(sequence.tokens) for sequence in answers[0].get().sequences] == [50, 50]
    assert all(len(answer.outcomes) == 1 for answer in answers)


def test_a_job_that_is_cancelled_before_it_began_is_answered_too(sampler: Sampler) -> None:
    jobs = [job(PROMPT, max_tokens=900) for _ in range(20)]
    answers = []
    for asked in jobs:
        answers.append(submit(sampler, asked))
        sampler.cancel(asked.request_id)
    assert all(isinstance(answer.get().error, UserError) for answer in answers)


def test_close_ends_running_and_later_jobs_as_lost(sampler: Sampler, hand: ServerHand) -> None:
    """A client whose sample was lost submits it again, elsewhere."""
    with hand.held():
        running = [submit(sampler, job(PROMPT, max_tokens=900)) for _ in range(5)]
        sampler.close()
        sampler.close()
        late = submit(sampler, job(PROMPT))
        for answer in [*running, late]:
            assert isinstance(answer.get().error, SamplerClosed)
            assert len(answer.outcomes) == 1
        until(lambda: hand.state()["running"] == 0)


@stand_ins_alone
def test_a_sample_of_a_server_that_is_failing_is_lost_and_not_failed(sampler: Sampler, hand: StandInHand) -> None:
    with hand.sick():
        assert isinstance(submit(sampler, job(PROMPT)).get().error, SamplerClosed)
    ask(sampler, job(PROMPT))


def test_a_closed_sampler_loads_nothing(sampler: Sampler, model: TorchModel) -> None:
    sampler.close()
    with pytest.raises(SamplerClosed):
        sampler.load_adapter("late", random_adapter(model))
    sampler.drop_adapter("late")
    sampler.cancel("late")


@stand_ins_alone
def test_close_ends_an_adapter_on_its_way_as_lost(sampler: Sampler, model: TorchModel, hand: ServerHand) -> None:
    with hand.held(), ThreadPoolExecutor(1) as threads:
        loading = threads.submit(sampler.load_adapter, "slow", random_adapter(model))
        until(lambda: hand.state()["running"] == 1)
        sampler.close()
        with pytest.raises(SamplerClosed, match=r"Adapter slow was not loaded\. The sampler was closed meanwhile"):
            loading.result(60)
    assert not sampler.has_adapter("slow")
    until(lambda: hand.state()["running"] == 0)
