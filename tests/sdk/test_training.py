"""Training through the unmodified SDK: the promises that a researcher's loop relies on."""

from __future__ import annotations

import math

import pytest
import tinker
from support.client.sdk import adam, next_token_datum
from tinker import types

from .conftest import MODEL

TOKENS = [5, 9, 2, 14, 7, 11, 3, 8]


def new_model(client: tinker.ServiceClient, **options: object) -> tinker.TrainingClient:
    return client.create_lora_training_client(MODEL, **{"rank": 8, "seed": 1, **options}).result()  # type: ignore[arg-type]


def test_a_pipelined_loop_lowers_the_loss(client: tinker.ServiceClient) -> None:
    model = new_model(client)
    rounds = [
        (model.forward_backward([next_token_datum(TOKENS)] * 4, "cross_entropy"), model.optim_step(adam()))
        for _ in range(12)
    ]
    losses = [forward_backward.result().metrics["loss:sum"] for forward_backward, _ in rounds]
    assert losses[0] == pytest.approx(4 * 7 * math.log(512), rel=0.1)
    assert losses[-1] < losses[0] / 2
    assert all(step.result().metrics["grad_norm"] > 0 for _, step in rounds)


def test_trap_10_two_calls_add_up_to_one(client: tinker.ServiceClient) -> None:
    """Losses are plain sums, so a batch can be split anywhere."""
    once, twice = new_model(client), new_model(client)
    data = [next_token_datum(TOKENS), next_token_datum(TOKENS[::-1])]
    once.forward_backward(data, "cross_entropy").result()
    for datum in data:
        twice.forward_backward([datum], "cross_entropy").result()
    norms = [model.optim_step(adam()).result().metrics["grad_norm"] for model in (once, twice)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_trap_7_a_failed_forward_backward_fails_the_step_behind_it_and_the_next_round_works(
    client: tinker.ServiceClient,
) -> None:
    model = new_model(client)
    bad = model.forward_backward([next_token_datum([5, 9, 9999])], "cross_entropy")
    step = model.optim_step(adam())
    with pytest.raises(tinker.RequestFailedError, match="9999") as failure:
        bad.result()
    assert failure.value.category == "user"
    with pytest.raises(tinker.RequestFailedError, match="forward_backward 1 failed"):
        step.result()
    model.forward_backward([next_token_datum(TOKENS)], "cross_entropy").result()
    assert model.optim_step(adam()).result().metrics["grad_norm"] > 0


def test_models_of_different_rank_and_modules_train_side_by_side(client: tinker.ServiceClient) -> None:
    models = [
        new_model(client, rank=4, train_mlp=False),
        new_model(client, rank=16, train_attn=False, train_unembed=False),
        new_model(client, rank=5),
    ]
    rounds = [
        [(m.forward_backward([next_token_datum(TOKENS)], "cross_entropy"), m.optim_step(adam())) for m in models]
        for _ in range(6)
    ]
    for index in range(len(models)):
        losses = [line[index][0].result().metrics["loss:sum"] for line in rounds]
        assert losses[-1] < losses[0]


def test_a_custom_loss_gets_its_surrogate_gradient(client: tinker.ServiceClient) -> None:
    """The SDK runs the user's function on the logprobs and sends negative weights back, with `loss:sum`."""
    import torch

    def negative_mean(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -torch.cat([values.flatten() for values in logprobs]).mean()
        return loss, {"mine:mean": float(loss.detach())}

    model, plain = new_model(client), new_model(client)
    result = model.forward_backward_custom([next_token_datum(TOKENS)], negative_mean).result()
    plain.forward_backward([next_token_datum(TOKENS, weight=1 / 7)], "cross_entropy").result()
    norms = [m.optim_step(adam()).result().metrics["grad_norm"] for m in (model, plain)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert "surrogate_loss:sum" in result.metrics


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "gspo", "dro", "stable_reinforce"])
def test_every_rl_loss_trains(client: tinker.ServiceClient, loss: types.LossFnType) -> None:
    model = new_model(client)
    inputs = {"target_tokens": TOKENS[1:], "logprobs": [-6.2] * 7, "advantages": [0.0, 0.0, 0.0, 1.0, -0.5, 1.0, 1.0]}
    datum = types.Datum(model_input=types.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=inputs)  # type: ignore[arg-type]
    result = model.forward_backward([datum], loss).result()
    assert "loss:sum" in result.metrics
    assert model.optim_step(adam()).result().metrics["grad_norm"] > 0
