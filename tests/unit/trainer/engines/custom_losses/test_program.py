"""The result and the limits of a custom loss. Hostile graphs are refused before they consume any resources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engine.graphs import node, ref, traced_id, written
from tinsmith_rpc.custom_losses import MAX_NODES, loss_id_of
from tinsmith_trainer.engines.custom_losses.program import Program, program_of
from tinsmith_trainer.errors import UserError
from torch import Tensor

TOKENS = 64


def program(*calls: dict[str, Any], **named: Any) -> Program:
    return program_of(loss_id_of(written(*calls, **named)))


def summed(name: str) -> dict[str, Any]:
    return node("loss", "sum", ref(name), op="call_method")


def _clipped(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    ratio = torch.exp(logprobs + 1)
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum(), {}


def _shapes(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    halves = torch.stack([logprobs[: logprobs.shape[0] // 2], logprobs[-(logprobs.shape[0] // 2) :]])
    weights = torch.softmax(advantages.view(1, -1)[:, ::2].expand(2, -1), dim=1)
    largest = logprobs.max(dim=0).values
    total = torch.zeros(3, dtype=logprobs.dtype).sum() + torch.arange(logprobs.numel()).float().mean()
    return (halves * weights).sum() + largest + total, {"custom/largest:mean": largest}


def _masked(logprobs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    chosen = logprobs[advantages > 0]
    picked = logprobs[advantages.argsort()[:3]]
    return -chosen.logsumexp(0) + torch.where(logprobs < -1, logprobs, logprobs.detach()).mean() + picked.sum(), {}


@pytest.mark.parametrize("fn", [_clipped, _shapes, _masked])
def test_a_graph_gives_the_bits_of_its_function(fn: Callable[..., Any]) -> None:
    draw = torch.Generator().manual_seed(0)
    values, advantages = -torch.rand(TOKENS, generator=draw), torch.randn(TOKENS, generator=draw)
    found = program_of(traced_id(fn, logprobs=1, advantages=1)).run([values, advantages], trains=True)
    leaf = values.clone().requires_grad_()
    loss, metrics = fn(leaf, advantages)
    loss.backward()
    assert found.gradient is not None
    assert leaf.grad is not None
    assert (found.loss, found.gradient.tolist()) == (loss.item(), leaf.grad.tolist())
    assert found.metrics == {name: value.item() for name, value in metrics.items()}


LP = ref("logprobs")
ACROSS = (node("a", "unsqueeze", LP, 0, op="call_method"), node("b", "unsqueeze", LP, 1, op="call_method"))

BOMBS: dict[str, tuple[dict[str, Any], ...]] = {
    "broadcast": (
        *ACROSS,
        node("c", "operator.mul", ref("a"), ref("b")),
        node("d", "unsqueeze", ref("c"), 2, op="call_method"),
        node("e", "operator.mul", ref("d"), LP),
        node("f", "unsqueeze", ref("e"), 3, op="call_method"),
        node("g", "operator.mul", ref("f"), LP),
        summed("g"),
    ),
    "expand": (node("a", "expand", ref("logprobs"), 2**40, -1, op="call_method"), summed("a")),
    "expand-by-tuple": (node("a", "expand", LP, {"tuple": [2**40, -1]}, op="call_method"), summed("a")),
    "repeat": (node("a", "repeat", LP, 2**30, op="call_method"), summed("a")),
    "tile": (node("a", "torch.tile", LP, {"tuple": [2**30]}), summed("a")),
    "zeros": (node("a", "torch.zeros", 2**30, 2**20), summed("a")),
    "zeros-by-name": (node("a", "torch.zeros", size={"tuple": [2**40]}), summed("a")),
    "new-ones": (node("a", "new_ones", LP, {"tuple": [2**40]}, op="call_method"), summed("a")),
    "full": (node("a", "torch.full", [2**40], 1.0), summed("a")),
    "arange": (node("a", "torch.arange", 0, 1e18), summed("a")),
    "pad": (node("a", "torch.nn.functional.pad", LP, {"tuple": [0, 2**40]}), summed("a")),
    "outer": (
        node("a", "torch.outer", LP, LP),
        node("c", "flatten", ref("a"), op="call_method"),
        node("d", "torch.outer", ref("c"), ref("c")),
        summed("d"),
    ),
    "diag": (
        node("a", "torch.outer", LP, LP),
        node("c", "flatten", ref("a"), op="call_method"),
        node("d", "torch.diag", ref("c")),
        summed("d"),
    ),
    "doubling": (
        node("n0", "torch.cat", [LP, LP]),
        *(node(f"n{i}", "torch.cat", [ref(f"n{i - 1}")] * 2) for i in range(1, 60)),
        summed("n59"),
    ),
    "stacking": (
        node("n0", "torch.stack", [LP] * 64),
        node("n1", "torch.stack", [ref("n0")] * 64),
        node("n2", "torch.stack", [ref("n1")] * 64),
        summed("n2"),
    ),
    "differences": (node("a", "torch.diff", LP, 2**20), summed("a")),
    "product-by-names": (
        *ACROSS,
        node("c", "operator.mul", ref("a"), ref("b")),
        node("column", "reshape", ref("c"), -1, 1, op="call_method"),
        node("row", "reshape", ref("c"), 1, -1, op="call_method"),
        node("d", "torch.matmul", other=ref("row"), input=ref("column")),
        summed("d"),
    ),
    "selection-by-names": (
        *ACROSS,
        node("c", "operator.mul", ref("a"), ref("b")),
        node("row", "reshape", ref("c"), 1, -1, op="call_method"),
        node("zeros", "torch.zeros", 2**12, dtype={"dtype": "int64"}),
        node("d", "torch.index_select", index=ref("zeros"), dim=0, input=ref("row")),
        summed("d"),
    ),
    "deep-chain-of-squares": (
        *ACROSS,
        node("m0", "operator.mul", ref("a"), ref("b")),
        *(node(f"m{i}", "torch.matmul", ref(f"m{i - 1}"), ref("m0")) for i in range(1, 60)),
        summed("m59"),
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_loss_that_would_compute_too_much_is_refused_before_it_runs(name: str) -> None:
    with pytest.raises(UserError, match="would compute more than 2097152 values"):
        program(*BOMBS[name]).check([torch.empty(TOKENS)])


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ((node("a", "getattr", LP, "__class__"), summed("a")), "getattr supports only"),
        ((node("a", "getattr", LP, "values"), summed("a")), "returns a "),
        ((node("a", "operator.pow", 9, 10**9), summed("a")), "to a power of at most 64"),
        ((node("a", "operator.mul", [1], 10**9), summed("a")), "takes tensors and numbers"),
        ((node("a", "operator.mul", 2**52, 2**52), summed("a")), "more than 64 bits"),
        ((node("a", "math.exp", LP), summed("a")), "takes numbers"),
        ((node("a", "torch.norm", LP, "nuc"), summed("a")), "nuclear norm"),
        ((node("a", "torch.div", 7, -1, rounding_mode="trunc"), summed("a")), "integers need rounding_mode"),
        ((node("a", "torch.exp", 1), summed("a")), "fails at a"),
        ((node("a", "view", LP, 3, 7, op="call_method"), summed("a")), "invalid for input of size 64"),
        ((node("a", "operator.getitem", LP, 64), summed("a")), "out of bounds"),
        ((node("a", "operator.getitem", LP, [0, 0, 0]), summed("a")), r"torch\.gather"),
        ((node("a", "unsqueeze", LP, 0, op="call_method"), node("loss", "torch.matmul", ref("a"), LP)), "a scalar"),
        ((node("loss", "torch.neg", LP),), r"a scalar float tensor as its loss, not torch.float32 of shape \[64\]"),
        ((node("loss", "torch.count_nonzero", LP),), "a scalar float tensor"),
        ((node("a", "detach", LP, op="call_method"), summed("a")), "does not depend on logprobs"),
        ((node("a", "reshape", LP, [1] * 9 + [64], op="call_method"), summed("a")), "10 dimensions"),
        (
            (node("a", "torch.zeros", 2000), node("b", "torch.unbind", ref("a")), summed("logprobs")),
            "into at most 1024 pieces, not into 2000",
        ),
    ],
)
def test_the_trial_run_finds_shapes_that_do_not_fit(calls: tuple[dict[str, Any], ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        program(*calls).check([torch.empty(TOKENS)])


def test_a_loss_or_a_gradient_that_is_not_finite_is_an_error_and_no_number() -> None:
    root = program(node("a", "torch.sqrt", LP), summed("a"))
    for values in (torch.full((4,), -1.0), torch.zeros(4)):  # NaN, and an infinite slope
        with pytest.raises(UserError, match="not finite"):
            root.run([values], trains=True)


def test_as_many_nodes_as_there_may_be_have_a_gradient() -> None:
    chain = [node("n0", "torch.neg", LP)]
    chain += [node(f"n{i}", "torch.neg", ref(f"n{i - 1}")) for i in range(1, MAX_NODES - 3)]
    deep = program(*chain, summed(f"n{MAX_NODES - 4}"))
    deep.check([torch.empty(TOKENS)])
    found = deep.run([torch.zeros(TOKENS)], trains=True)
    assert found.gradient is not None
    assert found.gradient.abs().tolist() == [1.0] * TOKENS
