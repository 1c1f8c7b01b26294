"""Train a second adapter on the same batches. docs/how-to/reinforcement-learning.md explains it.

`tinsmith train rl --example .` copies guessing.py into the current folder.
"""

import tinker
from guessing import guessing, secrets
from tinker import types
from tinsmith.training import MinibatchPlan, RLTrainer, ShadowClient, StepReport

MODEL, STEPS = "tiny", 25
ADAM = types.AdamParams(learning_rate=1.2e-2)


async def show(report: StepReport, sampler: tinker.SamplingClient) -> None:
    names = ("env/all/reward/total", "progress/most_stale_steps", "shadow/ppo/progress/steps")
    print(report.step + 1, *(report.metrics[name] for name in names), flush=True)


service = tinker.ServiceClient()
model, shadow_model = (service.create_lora_training_client(MODEL, rank=8, seed=1).result() for _ in range(2))
shadow = ShadowClient("ppo", shadow_model, ADAM, loss_fn="ppo")
trainer = RLTrainer(
    model,
    guessing(secrets(seed=1, count=1000, highest=5, guesses=2), group_size=6),
    MinibatchPlan(groups_per_step=16, groups_per_minibatch=8, most_stale_steps=1),
    ADAM,
    max_tokens=1,
    shadows=[shadow],
    on_step=[show],
)
trainer.train(STEPS)
service.close("success").result()
