"""A model on Megatron's layers is transformers' model, and its LoRA is PEFT's, however ranks divide it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nemo_rl.gloo import GlooRanks
from support.tiny_models import tiny_directory, tiny_model
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from tinsmith_trainer.torch_model.lora import StackedDelta, routed
from tinsmith_trainer.torch_model.tiny_model import Family, TinyShape
from torch import Tensor

# Two groups of two queries on each of two tensor ranks, and a vocabulary that two ranks cannot halve.
SIZES: Mapping[str, Any] = {"heads": 8, "kv_heads": 4, "intermediate_size": 96, "vocab_size": 511}
SHAPE = TinyShape(max_sequence_length=64, **SIZES)
TIED = TinyShape(max_sequence_length=64, tied_embeddings=True, **SIZES)
MODELS: tuple[tuple[Family, TinyShape], ...] = (
    ("qwen3", SHAPE),
    ("qwen3", TIED),
    ("llama3", SHAPE),
    ("llama3", TIED),
)
LAYOUTS = (
    Parallelism(),
    Parallelism(world_size=2, tensor=2),
    Parallelism(world_size=2, pipeline=2),
    Parallelism(world_size=4, tensor=2, pipeline=2),
)
RANK, MAX_RANK, SCALE = 4, 16, 2.0
UNTRAINED = "model.layers.1.mlp.up_proj"
CLOSE = 1e-4
# Of a gradient's largest element: it is a sum over tens of tokens, which a processor adds in an order of its own for
# each number of rows. 8 to 11 on two kinds of processors; a chunk that is missing is of another magnitude.
ROUNDINGS = 32

Layout = tuple[Parallelism, GlooRanks]


@dataclass(frozen=True, slots=True)
class Question:
    """A computation of a model: rows of tokens in two microbatches, targets, a weight for each, and an adapter.

    `chunk_tokens`: the number of tokens for which the model makes logits at a time, or None for all at once.
    """

    directory: Path
    tokens: Tensor
    targets: Tensor
    weights: Tensor
    adapter: Mapping[str, Tensor]
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """`gradients` as the adapter's, by name; `square_norm` as Megatron counts it. `logits` are what the model gave."""

    logits: Tensor
    logprobs: Tensor
    gradients: Mapping[str, Tensor]
    square_norm: float


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """A rank's part. Gradients come with the dimension that tensor ranks divide, and the whole shape."""

    logits: Tensor | None
    logprobs: Tensor | None
    gradients: Mapping[str, tuple[Tensor, int | None, tuple[int, int]]]
    square_norm: float


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda p: f"tensor{p.tensor}-pipeline{p.pipeline}")
def layout(request: pytest.FixtureRequest) -> Iterator[Layout]:
    with GlooRanks(request.param.world_size) as ranks:
        ranks.run(_join_layout, request.param)
        yield request.param, ranks


def _join_layout(parallelism: Parallelism) -> None:
    from tinsmith_trainer.engines.megatron.model.gpt_model import initialise_parallel

    initialise_parallel(parallelism, torch.distributed.get_rank())


@pytest.mark.parametrize(("family", "shape"), MODELS, ids=["qwen3", "qwen3-tied", "llama3", "llama3-tied"])
def test_logits_logprobs_and_gradients_are_those_of_transformers_with_peft(
    layout: Layout, family: Family, shape: TinyShape
) -> None:
    question = ask(tiny_directory(family, shape), shape)
    found = on_ranks(layout, question)
    wanted = by_transformers(tiny_model(family, shape).model, question)
    torch.testing.assert_close(found.logits[..., : shape.vocab_size], wanted.logits, atol=CLOSE, rtol=CLOSE)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=CLOSE, rtol=CLOSE)
    torch.testing.assert_close(padded(wanted.gradients), dict(found.gradients), atol=CLOSE, rtol=CLOSE)
    assert found.square_norm == pytest.approx(wanted.square_norm, rel=CLOSE)


def test_several_targets_at_a_position_have_a_logprob_each(layout: Layout) -> None:
    question = ask(tiny_directory("qwen3", SHAPE), SHAPE)
    several = torch.stack([question.targets, question.tokens, question.targets.flip(0)], dim=-1)
    question = replace(question, targets=several, weights=torch.randn(several.shape))
    found, wanted = on_ranks(layout, question), by_transformers(tiny_model("qwen3", SHAPE).model, question)
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=CLOSE, rtol=CLOSE)
    torch.testing.assert_close(padded(wanted.gradients), dict(found.gradients), atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize("several", [1, 3])
def test_logits_made_for_some_tokens_at_a_time_give_the_same(layout: Layout, several: int) -> None:
    """The adapter of the output layer included, whose vocabulary is divided among tensor ranks."""
    question = ask(tiny_directory("qwen3", SHAPE), SHAPE)
    targets = torch.stack([question.targets.roll(shift, 1) for shift in range(several)], dim=-1)
    whole = replace(question, targets=targets, weights=torch.randn(targets.shape))
    found, wanted = on_ranks(layout, replace(whole, chunk_tokens=6)), on_ranks(layout, whole)
    assert found.logits.shape[-1] == SHAPE.hidden_size * layout[0].tensor
    torch.testing.assert_close(found.logprobs, wanted.logprobs, atol=1e-6, rtol=1e-6)
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, gradient in wanted.gradients.items():
        rounding = ROUNDINGS * torch.finfo(gradient.dtype).eps * gradient.abs().max().item()
        torch.testing.assert_close(found.gradients[name], gradient, atol=rounding, rtol=0, msg=name)


def test_padding_of_vocabulary_rank_and_untrained_modules_counts_for_nothing(layout: Layout) -> None:
    found = on_ranks(layout, ask(tiny_directory("qwen3", SHAPE), SHAPE))
    padding = found.logits[..., SHAPE.vocab_size :]
    assert padding.shape[-1] == SHAPE.vocab_size % layout[0].tensor
    assert torch.all(padding.isneginf())
    for name, gradient in found.gradients.items():
        beyond_rank = gradient[RANK:] if name.endswith("lora_A") else gradient[:, RANK:]
        assert torch.count_nonzero(beyond_rank) == 0, name
        assert torch.count_nonzero(gradient).item() == 0 or not name.startswith(UNTRAINED), name


def ask(directory: Path, shape: TinyShape) -> Question:
    """Compute with an adapter whose B is not zero, so that A's gradient is not zero either."""
    torch.manual_seed(7)
    draw = partial(torch.randint, shape.vocab_size, (4, 11))
    layers = tiny_model("qwen3", shape).layers
    adapter = {}
    for module in sorted(set(layers) - {UNTRAINED}):
        adapter[f"{module}.lora_A"] = torch.randn(RANK, layers[module].in_features) * 0.1
        adapter[f"{module}.lora_B"] = torch.randn(layers[module].out_features, RANK) * 0.1
    return Question(directory, draw(), draw(), torch.randn(4, 11), adapter)


def by_transformers(model: Any, question: Question) -> Answer:
    leaves = {name: tensor[None].clone().requires_grad_() for name, tensor in question.adapter.items()}
    modules = {name.rpartition(".")[0] for name in leaves}
    scale = torch.full((1, 1, 1), SCALE)
    route = {module: StackedDelta(leaves[f"{module}.lora_A"], leaves[f"{module}.lora_B"], scale) for module in modules}
    with routed(route):
        logits = model(question.tokens).logits
    targets = question.targets.view(*question.tokens.shape, -1)
    logprobs = logits.log_softmax(-1).gather(-1, targets).view(question.targets.shape)
    (logprobs * question.weights).sum().backward()
    gradients = {name: leaf.grad[0] for name, leaf in leaves.items() if leaf.grad is not None}
    square_norm = sum(float(gradient.square().sum()) for gradient in gradients.values())
    return Answer(logits.detach(), logprobs.detach(), gradients, square_norm)


def padded(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with zeros for the rank's padding, and for what the adapter does not train."""
    whole = {}
    for name, gradient in gradients.items():
        missing = MAX_RANK - RANK
        whole[name] = torch.nn.functional.pad(gradient, (0, 0, 0, missing) if name.endswith("lora_A") else (0, missing))
    for part, like in (("lora_A", "gate_proj.lora_A"), ("lora_B", "gate_proj.lora_B")):
        whole[f"{UNTRAINED}.{part}"] = torch.zeros_like(whole[f"model.layers.1.mlp.{like}"])
    return whole


def on_ranks(layout: Layout, question: Question) -> Answer:
    """Compute on ranks, and join their parts."""
    parallelism, ranks = layout
    answers = ranks.run(_on_rank, question, parallelism)
    last = answers[-parallelism.tensor :]
    gradients: dict[str, Tensor] = {}
    for stage in range(parallelism.pipeline):
        of_stage = [answer.gradients for answer in answers[stage * parallelism.tensor :][: parallelism.tensor]]
        gradients |= {name: _whole([parts[name] for parts in of_stage]) for name in of_stage[0]}
    return Answer(
        logits=torch.cat([_there(answer.logits) for answer in last], dim=-1),
        logprobs=_alike([_there(answer.logprobs) for answer in last]),
        gradients=gradients,
        square_norm=sum(answer.square_norm for answer in answers),
    )


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _alike(tensors: list[Tensor]) -> Tensor:
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    return tensors[0]


def _whole(parts: list[tuple[Tensor, int | None, tuple[int, int]]]) -> Tensor:
    tensors, split, (rows, columns) = [part[0] for part in parts], *parts[0][1:]
    whole = _alike(tensors) if split is None else torch.cat(tensors, dim=split)
    assert torch.count_nonzero(whole[rows:]) == torch.count_nonzero(whole[:, columns:]) == 0
    return whole[:rows, :columns]


def _on_rank(question: Question, parallelism: Parallelism) -> RankAnswer:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
    from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
    from tinsmith_trainer.engines.megatron.model.gpt_model import build_megatron_model
    from tinsmith_trainer.engines.megatron.step.unembedding import defer_unembedding, target_logprobs

    model = build_megatron_model(question.directory, parallelism, max_rank=MAX_RANK)
    model.lora.set_scale(SCALE)
    _put(question.adapter, model.lora.tensors, parallel_state.get_tensor_model_parallel_rank())
    chunk = question.chunk_tokens
    deferred = None if chunk is None else defer_unembedding(model.chunk, chunk_tokens=chunk)
    logprobs_of = target_logprobs if deferred is None else deferred.logprobs
    logits, logprobs = [], []

    def forward(batches: Iterator[slice], chunk: Any) -> Any:
        rows = next(batches)
        tokens = question.tokens[rows]
        return chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None), partial(score, rows)

    def score(rows: slice, out: Tensor) -> Any:
        logits.append(out.detach().clone())
        found = logprobs_of(out, question.targets[rows])
        logprobs.append(found.detach())
        return (found * question.weights[rows]).sum(), torch.tensor(0, dtype=torch.int), {}

    with cpu_megatron():
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([slice(0, 2), slice(2, 4)]),
            model=[model.chunk],
            num_microbatches=2,
            seq_length=question.tokens.shape[1],
            micro_batch_size=2,
            forward_only=False,
        )
    tensors = model.lora.tensors
    return RankAnswer(
        torch.cat(logits) if logits else None,
        torch.cat(logprobs) if logprobs else None,
        {t.name: (_there(t.parameter.grad), t.split, t.full_shape) for t in tensors},
        sum(
            float(_there(t.parameter.grad).square().sum())
            for t in tensors
            if param_is_not_tensor_parallel_duplicate(t.parameter)
        ),
    )


def _put(adapter: Mapping[str, Tensor], places: Any, tensor_rank: int) -> None:
    with torch.no_grad():
        for place in places:
            whole = adapter.get(place.name)
            if whole is None:
                continue
            mine = whole
            if place.split is not None:
                width = place.parameter.shape[place.split]
                mine = whole.split(width, dim=place.split)[tensor_rank]
            place.parameter[: mine.shape[0], : mine.shape[1]] = mine
