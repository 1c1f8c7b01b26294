"""An agent and its evaluator, as users of rLLM write them. The reward is the share of letters in the answer.

A model with random weights answers with random characters. Its reward is neither 0 nor 1, and training raises it.
"""

from __future__ import annotations

import rllm
from openai import AsyncOpenAI
from rllm.types import AgentConfig, Episode, Step, Task, Trajectory


@rllm.rollout(name="letters")
async def agent(task: Task, config: AgentConfig) -> Episode:
    client = AsyncOpenAI(base_url=config.base_url, api_key="unused")
    asked = [{"role": "user", "content": task.metadata["question"]}]
    completion = await client.chat.completions.create(model=config.model, messages=asked)
    answer = completion.choices[0].message.content or ""
    step = Step(chat_completions=[*asked, {"role": "assistant", "content": answer}], model_response=answer)
    return Episode(trajectories=[Trajectory(name="letters", steps=[step])], artifacts={"answer": answer})


@rllm.evaluator
def share_of_letters(task: Task, episode: Episode) -> float:
    answer = episode.artifacts["answer"]
    return sum(character.isalpha() for character in answer) / max(1, len(answer))
