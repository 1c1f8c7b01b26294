"""An environment of `verifiers` that samples through OpenAI's client: verifiers_environment.py MODEL.

It runs in an environment of its own, which has `verifiers`.
"""

from __future__ import annotations

import json
import sys

import verifiers as vf
from datasets import Dataset
from openai import AsyncOpenAI

QUESTIONS = 6
ROLLOUTS = 4
MOST_TOKENS = 32


def boxed(completion: vf.Messages, answer: str) -> float:
    """1 for the right number in a box."""
    return float(rf"\boxed{{{answer}}}" in completion[-1]["content"])


def main(model: str) -> None:
    rows = [{"question": f"How much is {number} + 1?", "answer": str(number + 1)} for number in range(1, 1 + QUESTIONS)]
    environment = vf.SingleTurnEnv(eval_dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[boxed]))
    found = environment.evaluate_sync(
        AsyncOpenAI(), model, {"max_tokens": MOST_TOKENS}, num_examples=QUESTIONS, rollouts_per_example=ROLLOUTS
    )
    said = [completion[-1]["content"] for completion in found["completion"]]
    print(json.dumps({"rollouts": len(found["reward"]), "in a box": sum(r"\boxed{" in text for text in said)}))


if __name__ == "__main__":
    main(sys.argv[1])
