"""A program that trains with ART's backend for Tinker, as its users write it: art_loop.py MODEL FOLDER.

The reward is the digit that the model answers. A second backend on the same folder continues from the last checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys

import art
from art.tinker_native import TinkerNativeBackend

STEPS, GROUPS, ATTEMPTS = 3, 2, 8
QUESTION = "How much is 2 + 2?"
SERVER = {"server_args": {"host": "127.0.0.1"}}


async def main(base_model: str, folder: str) -> None:
    backend, model = await _registered(base_model, folder)
    for step in range(1, STEPS + 1):
        rounds = (art.TrajectoryGroup(_attempt(model) for _ in range(ATTEMPTS)) for _ in range(GROUPS))
        groups = await art.gather_trajectory_groups(rounds)
        result = await backend.train(model, groups, learning_rate=1e-3, save_checkpoint=step == STEPS)
        print(json.dumps({"step": result.step, **result.metrics}))
    await backend.close()
    backend, model = await _registered(base_model, folder)
    print(json.dumps({"resumed at": await model.get_step()}))
    await _attempt(model)
    await backend.close()


async def _registered(base_model: str, folder: str) -> tuple[TinkerNativeBackend, art.TrainableModel]:
    backend = TinkerNativeBackend(path=f"{folder}/art")
    model = art.TrainableModel(name="digits", project="recipes", base_model=base_model)
    await model.register(backend, _openai_client_config=SERVER)
    return backend, model


async def _attempt(model: art.TrainableModel) -> art.Trajectory:
    asked = {"role": "user", "content": QUESTION}
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=[asked], max_completion_tokens=24
    )
    [choice] = answer.choices
    digit = re.search(r"\d", choice.message.content or "")
    return art.Trajectory(messages_and_choices=[asked, choice], reward=int(digit[0]) / 9 if digit else 0.0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
