"""Losses of `create_custom_loss`, which the unmodified SDK sends: their numbers equal those of a local run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import tinker
import torch
from support.client.sdk import adam, exact_logprobs, next_token_datum
from support.server.serve_process import ServedInstallation
from tinker import types
from torch.nn import functional

MODEL = "Qwen/Qwen3-8B"
Loss = Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]

LENGTHS = (3, 7, 12)


def dpo(
    logprobs: torch.Tensor, mask: torch.Tensor, reference: torch.Tensor, sign: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute one side of a pair, with the other side's margin taken as 0."""
    margin = ((logprobs - reference) * mask).sum()
    return -functional.logsigmoid(0.1 * sign * margin), {"custom/margin:mean": margin}


def ppo_with_kl(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = torch.exp(logprobs - sampled)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    gap = sampled - logprobs
    penalty = torch.exp(gap) - 1 - gap
    clipped = ((ratio < 0.8) | (ratio > 1.2)).float() * mask
    loss = -((surrogate - 0.05 * penalty) * mask).sum() / mask.sum().clamp(min=1)
    return loss, {"custom/clipped:sum": clipped.sum(), "custom/kl:mean": penalty.mean()}


def kl_penalty(logprobs: torch.Tensor, sampled: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return functional.kl_div(sampled, logprobs, reduction="sum", log_target=True), {}


def masked_mean(logprobs: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Average over `kept`, which are whole numbers; the graph is as long as the mask."""
    return -logprobs[kept > 0].mean() * logprobs.shape[0] ** 0.5, {"custom/kept:sum": kept.sum()}


LOSSES: dict[str, tuple[Loss, dict[str, int]]] = {
    "dpo": (dpo, {"logprobs": 1, "mask": 1, "reference": 1, "sign": 0}),
    "ppo-with-kl": (ppo_with_kl, {"logprobs": 1, "sampled": 1, "advantages": 1, "mask": 1}),
    "kl": (kl_penalty, {"logprobs": 1, "sampled": 1}),
    "masked-mean": (masked_mean, {"logprobs": 1, "kept": 1}),
}


def datum(length: int) -> types.Datum:
    draw = torch.Generator().manual_seed(length)
    floats = {name: -6 + torch.randn(length, generator=draw) for name in ("sampled", "reference")} | {
        "advantages": torch.randn(length, generator=draw)
    }
    tokens = torch.randint(0, 500, (length + 1,), generator=draw)
    inputs = {name: types.TensorData.from_torch(values) for name, values in floats.items()} | {
        "target_tokens": types.TensorData.from_torch(tokens[1:]),
        "mask": types.TensorData.from_torch(torch.ones(length)),
        "kept": types.TensorData.from_torch((torch.arange(length) % 2 == 0).long()),
        "sign": types.TensorData(data=[1.0 if length % 2 else -1.0], dtype="float32", shape=[]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=inputs)


def on_the_client(fn: Loss, ranks: Mapping[str, int]) -> Callable[..., tuple[torch.Tensor, dict[str, float]]]:
    """Compute the loss as the SDK would: once for each datum, then summed."""

    def loss(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        read = [name for name in ranks if name != "logprobs"]
        found = [
            fn(own, *(one.loss_fn_inputs[name].to_torch() for name in read))
            for one, own in zip(data, logprobs, strict=True)
        ]
        metrics = {
            key: float(sum(float(own[key].detach()) for _, own in found)) / (len(found) if key.endswith(":mean") else 1)
            for key in found[0][1]
        }
        return torch.stack([value for value, _ in found]).sum(), metrics

    return loss


def new_model(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, rank=8, seed=1).result()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_the_worker_equals_the_loss_of_the_sdk(client: tinker.ServiceClient, name: str) -> None:
    fn, ranks = LOSSES[name]
    data = [datum(length) for length in LENGTHS]
    handle = client.create_custom_loss(fn, input_ranks=ranks).result()
    assert handle.loss_id is not None
    results, norms, after = [], [], []
    for loss in (handle, on_the_client(fn, ranks)):
        model = new_model(client)
        results.append(model.forward_backward_custom(data, loss).result())
        norms.append(model.optim_step(adam()).result().metrics["grad_norm"])
        after.append(exact_logprobs(model.forward([next_token_datum(range(1, 20))], "cross_entropy").result()))
    own, surrogate = results
    assert "surrogate_loss:sum" not in own.metrics
    for key in ("loss:sum", *(key for key in surrogate.metrics if key.startswith("custom/"))):
        assert own.metrics[key] == pytest.approx(surrogate.metrics[key], rel=1e-6, abs=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for one, other in zip(*after, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


def test_a_loss_in_the_worker_takes_one_call_where_the_sdk_takes_two(
    server: ServedInstallation, client: tinker.ServiceClient
) -> None:
    fn, ranks = LOSSES["kl"]
    handle = client.create_custom_loss(fn, input_ranks=ranks).result()
    calls = []
    for loss in (handle, on_the_client(fn, ranks)):
        model = new_model(client)
        model.forward_backward_custom([datum(5)], loss).result()
        asked = [server.retrieve(f"{model.model_id}:op:{number}").status_code for number in (1, 2)]
        calls.append(asked.count(200))
    assert calls == [1, 2]
