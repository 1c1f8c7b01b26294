"""First steps: train, resume, reinforce and export a LoRA adapter with the tinker SDK.

The program works with any Tinker server: TINKER_BASE_URL and TINKER_API_KEY select the server. `tinsmith demo` starts a
server and runs this program. To run the program yourself, start it in the folder with the model's directory, so that
the SDK finds the tokenizer:

    python first_steps.py --model demo/tiny --base-model-dir demo/tiny --out .
"""

from __future__ import annotations

import argparse
import math
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
import tinker
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tinker import types

mpl.use("Agg")  # needs no screen
import matplotlib.pyplot as plt

console = Console(highlight=False, emoji=False)

QUESTION = "What does a tinsmith make?"
DRINK_QUESTION = "What will you drink?"
DRINKS = ("Tea", "Coffee", "Milk", "Water")
WANTED_DRINK = "Tea"
LESSONS = [
    (QUESTION, "Pots, pans and lanterns."),
    ("Which metal does a tinsmith work?", "Tin and thin sheet iron."),
    ("Who trains the model?", "You do, one step at a time."),
    *((DRINK_QUESTION, drink) for drink in DRINKS),
]

TRAINING_STEPS = 64
RESUMED_STEPS = 4
RL_STEPS = 16
RL_GROUP_SIZE = 24
ADAM = types.AdamParams(learning_rate=5e-3)
RL_ADAM = types.AdamParams(learning_rate=6e-4)


def main() -> None:
    arguments = parse_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tinker.ServiceClient() as service:
        client = service.create_lora_training_client(arguments.model, rank=16, seed=1).result()
        tokenizer = client.get_tokenizer()

        chapter(f"1. An adapter that knows nothing yet: {QUESTION}")
        console.print(f"   {ask(client, tokenizer, QUESTION)!r}")

        chapter(f"2. {TRAINING_STEPS} steps of supervised training")
        losses = train(client, tokenizer)
        console.print(f"   the loss per token fell from {losses[0]:.2f} to {losses[-1]:.4f}")

        chapter(f"3. The same question again: {QUESTION}")
        console.print(f"   {ask(client, tokenizer, QUESTION)!r}")

        chapter("4. Save a checkpoint, and resume from it")
        resumed = resume(service, client, tokenizer)

        chapter(f"5. {RL_STEPS} steps of reinforcement learning: {DRINK_QUESTION} {WANTED_DRINK}, please")
        rewards = reinforce(resumed, tokenizer)
        console.print(f"   the mean reward rose from {rewards[0]:.2f} to {rewards[-1]:.2f}")

        chapter("6. Export the adapter, and load it in plain PEFT")
        adapter = export(resumed, arguments.out / "adapter")
        gap = compare_with_peft(resumed, tokenizer, arguments.base_model_dir, adapter)
        console.print(f"   the largest difference to the server's logprobs is {gap:.1e}")
        assert gap < 1e-3

    picture = arguments.out / "first_steps.png"
    draw(losses, rewards, picture)
    chapter("Done. What there is to look at")
    console.print(f"   the loss and the reward, drawn   {picture}", soft_wrap=True)
    console.print(f"   the adapter, in PEFT's format    {adapter}", soft_wrap=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a base model's name, as the server calls it")
    parser.add_argument("--base-model-dir", type=Path, required=True, help="its files, for the comparison with PEFT")
    parser.add_argument("--out", type=Path, default=Path("."), help="where the picture and the adapter go")
    return parser.parse_args()


def chapter(title: str) -> None:
    console.print(f"\n[bold]{title}[/bold]")


# ---- Prompts and data --------------------------------------------------------------------------


def prompt_for(tokenizer: Any, question: str) -> list[int]:
    return tokenizer.encode(f"User: {question}\nAssistant: ")


def lesson(tokenizer: Any, question: str, answer: str) -> types.Datum:
    """Make a datum of T tokens.

    At position i, the model predicts token i + 1; weights[i] says whether this prediction counts.
    """
    prompt = prompt_for(tokenizer, question)
    completion = [*tokenizer.encode(answer), tokenizer.eos_token_id]
    tokens = prompt + completion
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(completion),
        },
    )


def ask(client: tinker.TrainingClient, tokenizer: Any, question: str) -> str:
    """Return the most likely answer of the current adapter."""
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(prompt_for(tokenizer, question))
    params = types.SamplingParams(max_tokens=24, temperature=0.0)
    answer = sampler.sample(prompt, num_samples=1, sampling_params=params).result()
    return tokenizer.decode(answer.sequences[0].tokens, skip_special_tokens=True)


# ---- Supervised training -----------------------------------------------------------------------


def train(client: tinker.TrainingClient, tokenizer: Any) -> list[float]:
    """Submit all steps at once. The server runs the steps in order, and no step has to wait for the network."""
    batch = [lesson(tokenizer, *pair) for pair in LESSONS]
    steps = [(client.forward_backward(batch, "cross_entropy"), client.optim_step(ADAM)) for _ in range(TRAINING_STEPS)]
    losses = []
    columns = (TextColumn("   step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=TRAINING_STEPS)
        for forward_backward, optim_step in steps:
            losses.append(loss_per_token(forward_backward.result(), batch))
            optim_step.result()
            progress.update(task, advance=1, description=f"loss per token {losses[-1]:.4f}")
    return losses


def loss_per_token(output: types.ForwardBackwardOutput, batch: list[types.Datum]) -> float:
    """Return the mean loss of a token.

    The server returns the sum of the losses, so that a batch can be split anywhere.
    """
    return output.metrics["loss:sum"] / sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in batch)


def resume(service: tinker.ServiceClient, client: tinker.TrainingClient, tokenizer: Any) -> tinker.TrainingClient:
    """Restore weights and optimizer. After the restore, both clients make the same steps."""
    saved = client.save_state("first-lessons").result().path
    resumed = service.create_training_client_from_state_with_optimizer(saved).result()
    console.print(f"   saved as {saved}", soft_wrap=True)
    batch = [lesson(tokenizer, *pair) for pair in LESSONS]
    for step in range(RESUMED_STEPS):
        losses = []
        for each in (client, resumed):
            output = each.forward_backward(batch, "cross_entropy")
            each.optim_step(ADAM)
            losses.append(loss_per_token(output.result(), batch))
        console.print(f"   step {TRAINING_STEPS + step + 1}: loss per token {losses[0]:.6f}, resumed {losses[1]:.6f}")
        assert math.isclose(*losses, rel_tol=1e-4)
    return resumed


# ---- Reinforcement learning --------------------------------------------------------------------


def reinforce(client: tinker.TrainingClient, tokenizer: Any) -> list[float]:
    """Sample answers, reward the right answer, and make answers with more than the average reward more likely."""
    prompt = prompt_for(tokenizer, DRINK_QUESTION)
    rewards = []
    for step in range(RL_STEPS):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=step)
        group = sampler.sample(types.ModelInput.from_ints(prompt), RL_GROUP_SIZE, params).result().sequences
        group_rewards = [reward(tokenizer.decode(sequence.tokens, skip_special_tokens=True)) for sequence in group]
        mean_reward = sum(group_rewards) / len(group_rewards)
        rewards.append(mean_reward)
        console.print(f"   step {step + 1:2}  reward {mean_reward:.2f}  {'▪' * round(mean_reward * 40)}")
        experience = [
            rl_datum(prompt, sequence, advantage=its_reward - mean_reward)
            for sequence, its_reward in zip(group, group_rewards, strict=True)
        ]
        client.forward_backward(experience, "importance_sampling").result()
        client.optim_step(RL_ADAM).result()
    return rewards


def reward(answer: str) -> float:
    return 1.0 if answer == WANTED_DRINK else 0.0


def rl_datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Make a datum that assigns the advantage to the sampled tokens.

    Tokens of the prompt have no advantage, and thus no loss.
    """
    tokens = prompt + sequence.tokens
    padding = [0.0] * (len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": padding + sequence.logprobs,
            "advantages": padding + [advantage] * len(sequence.tokens),
        },
    )


# ---- Export ------------------------------------------------------------------------------------


def export(client: tinker.TrainingClient, directory: Path) -> Path:
    """Download the adapter's files through links that need no key."""
    exported = client.save_weights_external("first-steps").result()
    links = tinker.RestClient().get_external_weights_urls(exported.path).result()
    directory.mkdir(parents=True, exist_ok=True)
    for name, url in links.urls.items():
        urllib.request.urlretrieve(url, directory / name)
    return directory


def compare_with_peft(client: tinker.TrainingClient, tokenizer: Any, base_model_dir: Path, adapter: Path) -> float:
    """Return the largest difference between PEFT's logprobs and the server's logprobs for the tokens of a lesson."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # PEFT reads an attribute that transformers 5 has renamed, which causes a warning.
    warnings.filterwarnings("ignore", ".is_gradient_checkpointing. is deprecated", FutureWarning)
    tokens = [*prompt_for(tokenizer, QUESTION), *tokenizer.encode(LESSONS[0][1])]
    sampler = client.save_weights_and_get_sampling_client().result()
    served = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_model_dir), adapter)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    local = torch.log_softmax(logits, dim=-1)[range(len(tokens) - 1), tokens[1:]]
    return float((local - torch.tensor(served[1:])).abs().max())


# ---- Picture -----------------------------------------------------------------------------------


def draw(losses: list[float], rewards: list[float], file: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(range(1, len(losses) + 1), losses, color="tab:blue")
    left.set(title="Supervised training", xlabel="step", ylabel="loss per token", yscale="log")
    right.plot(range(1, len(rewards) + 1), rewards, color="tab:green", marker="o")
    right.set(title="Reinforcement learning", xlabel="step", ylabel="mean reward", ylim=(-0.05, 1.05))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
