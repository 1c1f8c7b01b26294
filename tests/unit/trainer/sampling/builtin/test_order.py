"""The order of jobs, and the order of eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from support.sampler.jobs import Answer, ask, job, prompt_of, random_adapter
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.base import SampleJob, SampleOutcome
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import TorchModel

BLOCK = 16


@pytest.fixture
def new_sampler(model: TorchModel) -> Iterator[Callable[[int], BuiltinSampler]]:
    """Make a sampler of this many rows that computes one prompt block between two steps."""
    opened = []

    def make(rows: int) -> BuiltinSampler:
        settings = BuiltinSamplerSettings(max_rows=rows, prefill_block_tokens=BLOCK, prefill_tokens_per_step=BLOCK)
        opened.append(BuiltinSampler(model, settings))
        return opened[-1]

    yield make
    for sampler in opened:
        sampler.close()


def order_of_answers(model: TorchModel, sampler: BuiltinSampler, jobs: Sequence[SampleJob]) -> list[int]:
    """Submit all jobs before any can run; return their indices in the order in which they ended."""
    ended: list[int] = []
    answers = [Answer() for _ in jobs]

    def ends(index: int) -> Callable[[SampleOutcome], None]:
        def done(outcome: SampleOutcome) -> None:
            ended.append(index)
            answers[index](outcome)

        return done

    with model.shared_device.turns.held(Use.TRAINING):
        for index, each in enumerate(jobs):
            sampler.submit(each, ends(index))
    for answer in answers:
        answer.get()
    return ended


def test_jobs_of_one_row_end_in_order_of_arrival(
    model: TorchModel, new_sampler: Callable[[int], BuiltinSampler]
) -> None:
    jobs = [job(prompt_of(10 + n), max_tokens=20 - n) for n in range(10)]
    assert order_of_answers(model, new_sampler(1), jobs) == list(range(10))


def test_a_long_prompt_does_not_stall_a_running_job(
    model: TorchModel, new_sampler: Callable[[int], BuiltinSampler]
) -> None:
    """Twenty tokens are drawn while the fifty blocks of the other prompt are being computed."""
    jobs = [job(prompt_of(10), max_tokens=20), job(prompt_of(50 * BLOCK), max_tokens=1)]
    assert order_of_answers(model, new_sampler(4), jobs) == [0, 1]


def test_a_full_batch_holds_up_only_the_jobs_that_need_it(
    model: TorchModel, new_sampler: Callable[[int], BuiltinSampler]
) -> None:
    sampler = new_sampler(1)
    sampler.load_adapter("tuned", random_adapter(model))
    base, waiting, tuned = (
        job(prompt_of(10), max_tokens=50),
        job(prompt_of(10), max_tokens=1),
        job(prompt_of(300), adapter="tuned", max_tokens=1),
    )
    assert order_of_answers(model, sampler, [base, waiting, tuned]) == [2, 0, 1]


def test_a_dropped_adapter_takes_its_prefixes_along(
    model: TorchModel, new_sampler: Callable[[int], BuiltinSampler]
) -> None:
    sampler = new_sampler(4)
    sampler.load_adapter("tuned", random_adapter(model))
    ask(sampler, job(prompt_of(100)))
    base_bytes = sampler._loop._prefixes.used_bytes
    ask(sampler, job(prompt_of(100), adapter="tuned"))
    assert sampler._loop._prefixes.used_bytes == 2 * base_bytes
    with model.shared_device.turns.held(Use.TRAINING):
        running = Answer()
        sampler.submit(job(prompt_of(90, seed=1), adapter="tuned"), running)
        sampler.drop_adapter("tuned")
    running.get()
    ask(sampler, job(prompt_of(100)))
    assert sampler._loop._prefixes.used_bytes == base_bytes
