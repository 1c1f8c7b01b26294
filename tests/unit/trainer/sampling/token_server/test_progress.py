"""The time that an engine may take for a step while it has requests."""

from __future__ import annotations

import pytest
from tinsmith_trainer.sampling.token_server.progress import STALL_SECONDS, StepWatch, steps_of

METRICS = """\
# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="base"} 9.0
vllm:iteration_tokens_total_count{engine="0",model_name="base"} 12.0
vllm:iteration_tokens_total_count{engine="1",model_name="base"} 1e+06
"""


def test_the_steps_of_all_engines_are_counted() -> None:
    assert steps_of(METRICS) == 1_000_012
    assert steps_of("") is None


@pytest.mark.parametrize(
    ("requests", "steps", "hung"),
    [(1, (5.0, 5.0), True), (1, (5.0, 6.0), False), (0, (5.0, 5.0), False), (1, (None, None), False)],
    ids=["no step", "a step", "no request", "unknown steps"],
)
def test_only_a_server_with_requests_that_makes_no_step_hangs(
    requests: int, steps: tuple[float | None, float | None], hung: bool
) -> None:
    now = 0.0
    watch = StepWatch(lambda: now)
    running = [watch.request() for _ in range(requests)]
    for one in running:
        one.__enter__()
    assert not watch.hangs(steps[0])
    now += STALL_SECONDS
    assert watch.hangs(steps[1]) == hung


def test_a_rest_before_a_request_does_not_count() -> None:
    now = 0.0
    watch = StepWatch(lambda: now)
    watch.hangs(5.0)
    now += STALL_SECONDS
    with watch.request():
        assert not watch.hangs(5.0)
