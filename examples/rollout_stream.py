"""Train on each rollout as soon as it arrives, like RLTrainer. docs/how-to/reinforcement-learning.md explains it."""

import asyncio

import tinker
from tinker import types
from tinsmith.training import BufferClosed, MinibatchPlan, RolloutBuffer, RolloutGroup, stream_minibatch_train

MODEL, STEPS = "tiny", 4
PROMPT = [5, 9, 2]


def datum(sample: types.SampledSequence, advantage: float) -> types.Datum:
    tokens, masked = PROMPT + sample.tokens, len(PROMPT) - 1
    inputs = {
        "target_tokens": tokens[1:],
        "logprobs": [0.0] * masked + sample.logprobs,
        "advantages": [0.0] * masked + [advantage] * len(sample.tokens),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


async def rollout(sampler: tinker.SamplingClient, policy_step: int) -> RolloutGroup:
    """Return eight answers. The more tokens of an answer are small numbers, the better the answer."""
    asked = types.SamplingParams(max_tokens=8)
    samples = (await sampler.sample_async(types.ModelInput.from_ints(PROMPT), 8, asked)).sequences
    rewards = [sum(token < 100 for token in sample.tokens) / len(sample.tokens) for sample in samples]
    mean = sum(rewards) / len(rewards)
    data = [datum(sample, reward - mean) for sample, reward in zip(samples, rewards, strict=True) if reward != mean]
    return RolloutGroup(data, policy_step)


async def main() -> None:
    model = await tinker.ServiceClient().create_lora_training_client_async(MODEL, rank=8)
    policy = (await model.save_weights_and_get_sampling_client_async(), 0)
    buffer = RolloutBuffer(groups=2)  # a sampler waits if it is further ahead of the training

    async def sample() -> None:
        try:
            while True:
                await buffer.put(await rollout(*policy))
        except BufferClosed:
            pass

    plan = MinibatchPlan(groups_per_step=4, groups_per_minibatch=2, most_stale_steps=1)
    async with asyncio.TaskGroup() as sampling:
        for _ in range(2):
            sampling.create_task(sample())
        async for step in stream_minibatch_train(model, buffer, plan, types.AdamParams(learning_rate=1e-2)):
            policy = (await model.save_weights_and_get_sampling_client_async(), step.step + 1)
            print(step.step, max(step.staleness), step.dropped_groups, step.metrics["loss:sum"], flush=True)
            if step.step + 1 == STEPS:
                break
        await buffer.close()


asyncio.run(main())
