"""Tenants share a sampler: whatever one asks for, another's small job is done within a number of forwards.

Counted in forwards, since seconds say more of the machine. A job that comes while the sampler is busy is handed in from
within a forward, so that it comes at the same moment in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from support.engine.contract import spec, train
from support.engine.datums import sft_datum
from support.sampler.jobs import Answer, ask, bits, job, prompt_of, random_adapter, submit
from tinsmith_trainer.engines.peft import build_peft_engine
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome, Sampler
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.batch import DecodeBatch
from tinsmith_trainer.sampling.builtin.forward import ForwardPass
from tinsmith_trainer.torch_model.loading import TorchModel

from .conftest import ALSO_ON_A_GPU, IN_ANOTHER_PROCESS, SAMPLERS

BLOCK = 16
ROWS = 4
SMALL = {"max_tokens": 4, "seed": 5}
ROW_BYTES = 256 * 2 * 2 * 2 * 16 * 4
"""A prompt of 256 tokens."""


@pytest.fixture(params=[True, False], ids=["deterministic", "fast"])
def deterministic(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def new_sampler(model: TorchModel, deterministic: bool) -> Iterator[Callable[..., BuiltinSampler]]:
    opened = []

    def make(**changes: int) -> BuiltinSampler:
        sizes = {"max_rows": ROWS, "prefill_block_tokens": BLOCK, "prefix_cache_bytes": 0} | changes
        opened.append(BuiltinSampler(model, BuiltinSamplerSettings(deterministic=deterministic, **sizes)))
        return opened[-1]

    yield make
    for sampler in opened:
        sampler.close()


class Forwards:
    """Counts them, and hands in jobs before a certain one."""

    def __init__(self) -> None:
        self.count = 0
        self._late: dict[int, Callable[[], None]] = {}

    def at(self, number: int, sampler: Sampler, late: SampleJob) -> LateAnswer:
        answer = LateAnswer(self)
        self._late[number] = lambda: answer.submit(sampler, late)
        return answer

    def tick(self) -> None:
        self.count += 1
        if act := self._late.pop(self.count, None):
            act()


class LateAnswer(Answer):
    """Knows how many forwards went by until it was there."""

    def __init__(self, forwards: Forwards) -> None:
        super().__init__()
        self._forwards = forwards
        self._requested_at = 0
        self.forwards = 0

    def submit(self, sampler: Sampler, late: SampleJob) -> None:
        self._requested_at = self._forwards.count
        sampler.submit(late, self)

    def __call__(self, outcome: SampleOutcome) -> None:
        self.forwards = self._forwards.count - self._requested_at
        super().__call__(outcome)


@contextmanager
def counted(model: TorchModel) -> Iterator[Forwards]:
    """Jobs that are submitted in the block run behind it."""
    forwards = Forwards()
    with pytest.MonkeyPatch.context() as patch:
        run = ForwardPass._run

        def running(*args: object, **kwargs: object) -> object:
            forwards.tick()
            return run(*args, **kwargs)  # type: ignore[arg-type]

        patch.setattr(ForwardPass, "_run", running)
        yield forwards


def flood(count: int, prompt_tokens: int, max_tokens: int, **changes: object) -> list[SampleJob]:
    return [
        replace(
            job(prompt_of(prompt_tokens, seed=n), max_tokens=max_tokens, seed=n, request_id=f"flood-{n}", **changes),
            tenant="flood",
        )
        for n in range(count)
    ]


def small(prompt_tokens: int = 10, **changes: object) -> SampleJob:
    return replace(job(prompt_of(prompt_tokens, seed=99), **(SMALL | changes)), tenant="small")


def submit_all(model: TorchModel, sampler: Sampler, jobs: Sequence[SampleJob]) -> list[Answer]:
    with model.shared_device.turns.held(Use.TRAINING):
        return [submit(sampler, each) for each in jobs]


def same(outcome: SampleOutcome, alone: SampleOutcome, deterministic: bool) -> None:
    """Bit for bit where that is promised, else to 1e-4."""
    if deterministic:
        assert bits(outcome) == bits(alone)
        return
    for found, expected in zip(outcome.sequences, alone.sequences, strict=True):
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


# --- a small job during a flood ---


def test_a_small_job_does_not_wait_for_the_prompts_of_a_flood(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler]
) -> None:
    """One block of its own, four tokens, and what was under way."""
    sampler = new_sampler()
    with counted(model) as forwards:
        late = forwards.at(5, sampler, small())
        answers = submit_all(model, sampler, flood(8, prompt_tokens=600, max_tokens=2))
        late.get()
        assert late.forwards <= 1 + 4 + 2
        assert not any(answer.outcomes for answer in answers)
        [answer.get() for answer in answers]


@pytest.mark.parametrize("prompt_tokens", [10, 300], ids=["one extent", "two extents"])
def test_a_small_job_gets_a_row_of_a_full_batch(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler], prompt_tokens: int
) -> None:
    sampler = new_sampler()
    with counted(model) as forwards:
        blocks = ROWS * (prompt_tokens // BLOCK + 1)
        late = forwards.at(blocks + 5, sampler, small())
        answers = submit_all(model, sampler, flood(3 * ROWS, prompt_tokens, max_tokens=150))
        late.get()
        assert late.forwards <= 1 + 4 + 3
        assert not any(answer.outcomes for answer in answers)
        [answer.get() for answer in answers]


@pytest.mark.parametrize("rows", [1, 2])
def test_more_tenants_than_rows_take_turns(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler], rows: int
) -> None:
    """None waits for another's generation to end."""
    sampler = new_sampler(max_rows=rows)
    tenants = [f"tenant-{n}" for n in range(4)]
    jobs = [replace(job(prompt_of(10, seed=n), max_tokens=200), tenant=name) for n, name in enumerate(tenants)]
    with counted(model) as forwards:
        late = forwards.at(150, sampler, small())
        answers = submit_all(model, sampler, jobs)
        late.get()
        assert late.forwards <= 60
        assert not any(answer.outcomes for answer in answers)
        [answer.get() for answer in answers]


def test_a_tenant_that_fills_the_memory_for_keys_gives_way(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler]
) -> None:
    """The small job needs a batch of its own, for which there is no room."""
    sampler = new_sampler(kv_cache_bytes=4 * ROWS * ROW_BYTES)
    sampler.load_adapter("tuned", random_adapter(model))
    jobs = [*flood(2 * ROWS, 10, 240), *flood(4, 300, 150), *flood(4, 600, 150)]
    with counted(model) as forwards:
        late = forwards.at(300, sampler, replace(small(), adapter_key="tuned"))
        answers = submit_all(model, sampler, jobs)
        late.get()
        assert late.forwards <= 40
        assert len([answer for answer in answers if answer.outcomes]) <= ROWS
        [answer.get() for answer in answers]


def test_memory_is_given_up_at_any_moment_of_a_tenants_pass(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler]
) -> None:
    """Batches that it would have stepped next are gone then, and come back as others."""
    sampler = new_sampler(kv_cache_bytes=4 * ROWS * ROW_BYTES)
    sampler.load_adapter("tuned", random_adapter(model))
    jobs = [*flood(2 * ROWS, 10, 240), *flood(4, 300, 150), *flood(4, 600, 150)]
    with counted(model) as forwards:
        late = [forwards.at(at, sampler, replace(small(), adapter_key="tuned")) for at in range(200, 440, 20)]
        answers = submit_all(model, sampler, jobs)
        assert [answer.get().error for answer in [*late, *answers]] == [None] * (len(late) + len(jobs))


def test_tenants_without_end_do_not_starve_the_one_with_large_jobs(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler]
) -> None:
    sampler = new_sampler(max_rows=1)
    with counted(model):
        large = submit_all(model, sampler, flood(1, 200, 50))
        rounds = 0
        while not large[0].outcomes:
            ask(sampler, small())
            rounds += 1
        assert rounds < 100


@pytest.mark.parametrize("sampler", [*SAMPLERS, IN_ANOTHER_PROCESS], indirect=True)
def test_a_small_job_is_done_before_any_of_a_flood(sampler: Sampler) -> None:
    """The tenant's name crosses the network with the job."""
    answers = [submit(sampler, each) for each in flood(40, 60, max_tokens=900)]
    assert submit(sampler, small()).get().error is None
    assert not any(answer.outcomes for answer in answers)
    for number in range(len(answers)):
        sampler.cancel(f"flood-{number}")
    [answer.get() for answer in answers]


# --- what company and giving way change ---


@pytest.mark.parametrize("model", ALSO_ON_A_GPU, indirect=True)
def test_preempted_rows_continue_with_the_same_tokens(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler], deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parked = []
    park = DecodeBatch.park
    monkeypatch.setattr(DecodeBatch, "park", lambda batch, sample: (parked.append(sample), park(batch, sample)))
    sizes = {"max_rows": 2, "kv_cache_bytes": 2 * ROW_BYTES}
    crowded, alone = new_sampler(**sizes), new_sampler(**sizes)
    for sampler in (crowded, alone):
        for name in ("one", "two"):
            sampler.load_adapter(name, random_adapter(model, seed=len(name), rank=6))
    jobs = [
        replace(job(prompt_of(200 + 20 * n, seed=n), max_tokens=60, adapter=adapter, num_samples=2), tenant=tenant)
        for n, (tenant, adapter) in enumerate([("a", "one"), ("b", ""), ("c", "two"), ("a", ""), ("b", "one")])
    ]
    answers = submit_all(model, crowded, jobs)
    for asked, answer in zip(jobs, answers, strict=True):
        same(answer.get(), ask(alone, asked), deterministic)
    assert len(parked) >= 3


def test_a_few_rows_that_step_without_the_many_draw_the_same(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler], deterministic: bool
) -> None:
    sampler = new_sampler(max_rows=32)
    for name, seed in (("one", 1), ("two", 2)):
        sampler.load_adapter(name, random_adapter(model, seed=seed, rank=6))
    few = [replace(small(max_tokens=40), adapter_key=name) for name in ("one", "two")]
    alone = [ask(sampler, each) for each in few]
    for crowd in (flood(30, 10, 60, adapter="one"), flood(30, 10, 60)):
        answers = submit_all(model, sampler, [*crowd, *few])
        for answer, expected in zip(answers[-2:], alone, strict=True):
            same(answer.get(), expected, deterministic)
        [answer.get() for answer in answers]


# --- training on the same device ---


@pytest.mark.parametrize("model", ALSO_ON_A_GPU, indirect=True)
def test_training_and_sampling_at_the_same_time_change_nothing_for_each_other(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler], deterministic: bool
) -> None:
    sampler = new_sampler()
    jobs = [replace(job(prompt_of(40, seed=n), max_tokens=60), tenant=f"tenant-{n}") for n in range(3)]
    quiet = [ask(sampler, each) for each in jobs]
    engine, calls = build_peft_engine(model), 0
    engine.create_adapter("a", spec(engine))

    answers = [submit(sampler, each) for each in jobs]
    while not calls or not all(answer.outcomes for answer in answers):
        train(engine, [sft_datum(60, seed=calls), sft_datum(30, seed=calls)])
        calls += 1

    for answer, alone in zip(answers, quiet, strict=True):
        same(answer.get(), alone, deterministic)
    alone_engine = build_peft_engine(model)
    alone_engine.create_adapter("a", spec(alone_engine))
    for call in range(calls):
        train(alone_engine, [sft_datum(60, seed=call), sft_datum(30, seed=call)])
    expected = alone_engine.state("a").tensors
    for name, values in engine.state("a").tensors.items():
        np.testing.assert_allclose(values, expected[name], rtol=0, atol=0 if model.device.type == "cpu" else 1e-3)


# --- a tenant alone ---


def test_a_tenant_alone_takes_as_many_forwards_as_if_there_were_no_shares(
    model: TorchModel, new_sampler: Callable[..., BuiltinSampler]
) -> None:
    """Eight prompts of seven blocks each, a step between two blocks once there is a row, twenty tokens each."""
    sampler = new_sampler(max_rows=8, prefill_tokens_per_step=BLOCK)
    with counted(model) as forwards:
        answers = submit_all(model, sampler, flood(8, 7 * BLOCK + 1, max_tokens=20))
        [answer.get() for answer in answers]
    assert forwards.count == 8 * 7 + 7 * 7 + 20
    sampler = new_sampler(max_rows=8, prefill_tokens_per_step=10_000, prefill_forward_tokens=BLOCK)
    with counted(model) as forwards:
        answers = submit_all(model, sampler, flood(16, 7 * BLOCK + 1, max_tokens=20))
        [answer.get() for answer in answers]
    assert forwards.count == 16 * 7 + 2 * 20
