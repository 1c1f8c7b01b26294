"""The ranks' parts of an adapter, joined to whole tensors, and the step that torch alone makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tinsmith_trainer.engines.base import AdamParams
from torch import Tensor

Groups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Joined:
    """An adapter's state over all ranks, by group and tensor name."""

    step: int
    groups: Groups


@dataclass(frozen=True, slots=True)
class Played:
    """The results of a program's events, in their order."""

    norms: list[float]
    reads: list[Joined]


def torch_step(before: Joined, params: AdamParams) -> tuple[float, dict[str, Tensor]]:
    """Return the gradient's norm, and the weights after one AdamW of torch's own on joined tensors."""
    weights = {name: torch.nn.Parameter(values.clone()) for name, values in before.groups["weights"].items()}
    for name, weight in weights.items():
        weight.grad = before.groups["gradients"][name].clone()
    norm = torch.nn.utils.clip_grad_norm_(weights.values(), params.grad_clip_norm or float("inf"))
    adam = torch.optim.AdamW(
        weights.values(),
        lr=params.learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.eps,
        weight_decay=params.weight_decay,
    )
    for name, weight in weights.items() if before.step else ():
        adam.state[weight] = {
            "step": torch.tensor(float(before.step)),
            "exp_avg": before.groups["adam/exp_avg"][name].clone(),
            "exp_avg_sq": before.groups["adam/exp_avg_sq"][name].clone(),
        }
    adam.step()
    return norm.item(), {name: weight.detach() for name, weight in weights.items()}


def assert_same_bits(found: Played, expected: Played) -> None:
    assert found.norms == expected.norms
    for one, other in zip(found.reads, expected.reads, strict=True):
        assert_same_state(one, other)


def assert_same_state(found: Joined, expected: Joined) -> None:
    assert (found.step, found.groups.keys()) == (expected.step, expected.groups.keys())
    for group, tensors in expected.groups.items():
        different = [name for name, values in tensors.items() if not torch.equal(found.groups[group][name], values)]
        assert not different, (group, different)
