"""A program that trains on an environment of verifiers: verifiers_program.py PACKAGES MODEL TOKENIZER.

PACKAGES has verifiers, in addition to this Python's own packages. The program prints for each step its number, the
turns of an episode, the mean reward, and the mean of each part of the reward.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tinker
from tinker import types
from tinker_cookbook.renderers import get_renderer
from tinsmith.training import MinibatchPlan, RLTrainer, StepReport, from_verifiers
from transformers import AutoTokenizer

PACKAGES_OF_ENVIRONMENTS = Path(__file__).with_name("verifiers_packages")
STEPS = 3


async def show(report: StepReport, sampler: tinker.SamplingClient) -> None:
    metrics = report.metrics
    words = ("turns_per_episode", "reward/total", "vowels")
    print(report.step + 1, *(metrics[f"env/all/{word}"] for word in words), flush=True)


def main(packages: str, model_name: str, tokenizer_folder: str) -> None:
    sys.path += [packages, str(PACKAGES_OF_ENVIRONMENTS)]
    import verifiers

    environment = verifiers.load_environment("vowels-twice", questions=6)
    renderer = get_renderer("role_colon", AutoTokenizer.from_pretrained(tokenizer_folder))
    service = tinker.ServiceClient()
    model = service.create_lora_training_client(model_name, rank=8, seed=1).result()
    RLTrainer(
        model,
        from_verifiers(environment, renderer, group_size=4),
        MinibatchPlan(groups_per_step=2, groups_per_minibatch=1),
        types.AdamParams(learning_rate=1e-2),
        max_tokens=12,
        seed=1,
        on_step=[show],
    ).train(STEPS)
    service.close("success").result()


if __name__ == "__main__":
    main(*sys.argv[1:])
