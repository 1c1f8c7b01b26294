"""An environment package in the format of verifiers' hub, without any knowledge of Tinsmith."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

TURNS = 2


def vowels(completion: vf.Messages) -> float:
    """Return the share of vowels in the model's answer."""
    said = "".join(message["content"] for message in completion if message["role"] == "assistant")
    return sum(letter in "aeiou" for letter in said) / max(1, len(said))


class Twice(vf.MultiTurnEnv):
    """An environment that asks for the same answer again."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **_: object) -> vf.Messages:
        return [{"role": "user", "content": "Again."}]


def load_environment(questions: int = 10) -> vf.Environment:
    rows = [{"question": f"Say vowels, {number} times.", "answer": ""} for number in range(questions)]
    return Twice(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[vowels]), max_turns=TURNS)
