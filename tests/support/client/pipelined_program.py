"""An SDK program that submits all its rounds at once, is disturbed in the middle, and keeps every answer.

Two runs with equal results, bit for bit, have executed every acknowledged operation exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tinker
from safetensors.numpy import load_file
from support.client.sdk import Served, adam, exact_logprobs, next_token_datum, service_client
from tinker.lib.public_interfaces.custom_loss import LossHandle
from torch import Tensor

TINY_MODEL = "Qwen/Qwen3-8B"
ROUNDS = 12
TOKENS = [[5, 9, 2, 14, 7, 11, 3, 8], [4, 4, 8, 15, 16, 23], [7, 1, 6, 8, 0, 3, 3]]
CHECKPOINT_FILES = ("adapter_model.safetensors", "optimizer.safetensors")


@dataclass(frozen=True)
class Ending:
    """The results of a run: each answer, and each tensor of its last checkpoint."""

    logprobs: list[list[list[float]]]
    grad_norms: list[float]
    optimizer_steps: list[float]
    tensors: dict[str, bytes]

    def ran_each_step_once(self) -> bool:
        return self.optimizer_steps == [float(step) for step in range(1, ROUNDS + 1)]


def run_program(
    client: tinker.ServiceClient,
    base_model: str,
    disturb: Callable[[], None],
    fetch_checkpoint: Callable[[str], Path],
    own_loss: LossHandle | None = None,
) -> Ending:
    """Submit all rounds without waiting, disturb after a third of them is answered, and wait for the rest.

    `fetch_checkpoint` turns a tinker path into a folder of files to read. Every other round has `own_loss`, if one is
    given.
    """
    model = client.create_lora_training_client(base_model, rank=8, seed=1).result()
    rounds = []
    for index in range(ROUNDS):
        data = [next_token_datum(TOKENS[(index + offset) % 3]) for offset in range(3)]
        trained = (
            model.forward_backward(data, "cross_entropy")
            if own_loss is None or index % 2
            else model.forward_backward_custom(data, own_loss)
        )
        rounds.append((trained, model.optim_step(adam(3e-3))))
    rounds[ROUNDS // 3][1].result()
    disturb()
    forwards = [forward.result() for forward, _ in rounds]
    steps = [step.result().metrics or {} for _, step in rounds]
    folder = fetch_checkpoint(model.save_state("final").result().path)
    return Ending(
        logprobs=[exact_logprobs(forward) for forward in forwards],
        grad_norms=[step["grad_norm"] for step in steps],
        optimizer_steps=[step["step"] for step in steps],
        tensors={
            name: tensor.tobytes() for file in CHECKPOINT_FILES for name, tensor in load_file(folder / file).items()
        },
    )


def surprise(logprobs: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a loss that runs in the worker, and that gives unlikely tokens more weight."""
    found = -(logprobs * weights)
    return (found * found.detach().sigmoid()).mean(), {"custom/most:mean": found.max()}


def checkpoint_run_folder(tinker_path: str) -> str:
    """Return the folder of a training checkpoint below the checkpoint root."""
    return f"weights/{tinker_path.split('/')[2].replace(':', '.')}"


def run_on(server: Served, checkpoints: Path, disturb: Callable[[], None]) -> Ending:
    """Run the whole program as a client of its own. `checkpoints` is the checkpoint root."""

    def fetch_checkpoint(tinker_path: str) -> Path:
        [folder] = (checkpoints / checkpoint_run_folder(tinker_path)).iterdir()
        return folder

    with service_client(server) as client:
        own_loss = client.create_custom_loss(surprise, input_ranks={"logprobs": 1, "weights": 1}).result()
        return run_program(client, TINY_MODEL, disturb, fetch_checkpoint, own_loss)
