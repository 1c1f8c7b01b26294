"""Steps of a stream on the real server: equal to one call with the same data, and computed while data arrives."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import tinker
from support.client.page_programs import PLACE_OF_MODEL, example_program
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.server.serve_process import API_KEY, ServedInstallation
from tinker import types
from tinsmith.training.streams import MinibatchPlan, RolloutBuffer, RolloutGroup, stream_minibatch_train

from .conftest import MODEL

CLIPPED = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
LOSSES: Sequence[tuple[types.LossFnType, dict[str, float | str] | None]] = (
    ("importance_sampling", None),
    ("ppo", {**CLIPPED}),
)


def new_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=8, seed=1).result()


def rollout(number: int) -> types.Datum:
    """Return a rollout of a policy that was nearly uniform over the 512 tokens."""
    tokens = [number % 500 + 1, *range(3, 3 + number % 5 + 2)]
    targets = tokens[1:]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={  # type: ignore[arg-type]  # the SDK turns lists into tensors
            "target_tokens": targets,
            "logprobs": [-6.2 + 0.05 * (number % 3)] * len(targets),
            "advantages": [1.0 if number % 2 else -0.7] * len(targets),
        },
    )


def groups_of(step: int) -> list[RolloutGroup]:
    """Return four groups of different sizes for a step."""
    return [
        RolloutGroup([rollout(20 * step + 4 * group + one) for one in range(1 + group % 3)], policy_step=step)
        for group in range(4)
    ]


async def arriving(groups: Sequence[RolloutGroup]) -> AsyncIterator[RolloutGroup]:
    for group in groups:
        yield group


@pytest.mark.parametrize("loss", LOSSES, ids=[name for name, _ in LOSSES])
async def test_a_stream_trains_as_the_collected_batch(client: tinker.ServiceClient, loss: Any) -> None:
    """Logprobs agree within 1e-5 after three steps of Adam.

    Gradients are summed in another order, and Adam divides small ones by their own size: which of float32's steps of
    4.8e-7 it comes to depends on the processor. Up to 2.4e-6 was seen.
    """
    loss_fn, config = loss
    collected, streamed = new_model(client), new_model(client)
    by_step = [groups_of(step) for step in range(3)]
    batches = [[datum for group in groups for datum in group.data] for groups in by_step]
    norms = []
    for batch in batches:
        await collected.forward_backward(batch, loss_fn, config)
        norms.append((await collected.optim_step(adam())).metrics["grad_norm"])
    plan = MinibatchPlan(groups_per_step=4, groups_per_minibatch=1)
    groups = [group for step in by_step for group in step]
    reports = [
        report
        async for report in stream_minibatch_train(
            streamed, arriving(groups), plan, adam(), loss_fn=loss_fn, loss_fn_config=config
        )
    ]
    assert [report.minibatches for report in reports] == [4, 4, 4]
    assert [report.metrics["grad_norm"] for report in reports] == pytest.approx(norms, rel=1e-6)
    probe = [next_token_datum([1, 3, 4, 5, 6, 7])]
    apart, together = [exact_logprobs(await model.forward(probe, "cross_entropy")) for model in (streamed, collected)]
    assert apart[0] == pytest.approx(together[0], abs=1e-5)


async def test_a_minibatch_is_trained_while_the_next_rollouts_are_sampled(client: tinker.ServiceClient) -> None:
    """The second group is sampled only when the server has computed the gradient of the first."""
    model, buffer = new_model(client), RolloutBuffer(1)
    computed = asyncio.Event()
    plan = MinibatchPlan(groups_per_step=2, groups_per_minibatch=1)

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def forward_backward(self, *arguments: Any) -> Any:
            return asyncio.ensure_future(self._watched(model.forward_backward(*arguments)))

        async def _watched(self, future: Any) -> types.ForwardBackwardOutput:
            result: types.ForwardBackwardOutput = await future
            computed.set()
            return result

    async def sample() -> None:
        await buffer.put(RolloutGroup([rollout(1)], 0))
        await computed.wait()
        await buffer.put(RolloutGroup([rollout(2)], 0))
        await buffer.close()

    sampling = asyncio.create_task(sample())
    steps = stream_minibatch_train(Watched(), buffer, plan, adam())  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        reports = [report async for report in steps]
    await sampling
    assert [report.minibatches for report in reports] == [2]


def test_the_example_trains_off_policy_to_its_bound(server: ServedInstallation) -> None:
    """Run it with two samplers, which continue during the steps."""
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": API_KEY}
    source = example_program("rollout_stream.py")
    command = [sys.executable, "-c", source.replace(PLACE_OF_MODEL, f'"{MODEL}"')]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines()]
    assert [int(step) for step, *_ in steps] == [0, 1, 2, 3]
    assert all(int(staleness) <= 1 for _, staleness, *_ in steps)
