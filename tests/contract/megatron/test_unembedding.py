"""Logprobs of targets without a sequence's logits: how few there are at a time, and sequences that ranks share."""

from __future__ import annotations

import torch
from support.nemo_rl.gloo import run_on_ranks
from tinsmith_trainer.engines.megatron.parallelism import Parallelism
from torch import Tensor

HIDDEN, VOCAB, LENGTH, ROWS, CHUNK_TOKENS = 16, 24, 12, 2, 8
CLOSE = {"atol": 1e-6, "rtol": 1e-6}


def drawn() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states `[S, B, H]`, the output layer's weight, and targets with weights of all positions but the last."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(LENGTH, ROWS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    targets = torch.randint(VOCAB, (ROWS, LENGTH - 1), generator=generator)
    return hidden, weight, targets, torch.randn(ROWS, LENGTH - 1, generator=generator)


def _on_piece(tensor: int) -> tuple[Tensor, Tensor, int]:
    """Logprobs, the gradient of this rank's piece of the sequence, and the most tokens that had logits at a time."""
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig
    from tinsmith_trainer.engines.megatron.model.cpu_megatron import cpu_megatron
    from tinsmith_trainer.engines.megatron.model.gpt_model import initialise_parallel
    from tinsmith_trainer.engines.megatron.step.unembedding import DeferredUnembedding

    rank = torch.distributed.get_rank()
    initialise_parallel(Parallelism(tensor, tensor=tensor), rank)
    hidden, weight, targets, weights = drawn()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
    )
    seen: list[int] = []
    with cpu_megatron():
        layer = ColumnParallelLinear(
            HIDDEN, VOCAB, config=config, init_method=torch.nn.init.zeros_, bias=False, gather_output=False
        )
        layer.weight.data.copy_(weight.chunk(tensor)[rank])
        layer.requires_grad_(False)
        layer.register_forward_hook(lambda _layer, _inputs, out: seen.append(out[0].shape[:2].numel()))
        deferred = DeferredUnembedding(layer, pieces=tensor, chunk_tokens=CHUNK_TOKENS)
        piece = hidden.chunk(tensor)[rank].clone().requires_grad_()
        given, _ = deferred(piece, weight=None, runtime_gather_output=None)
        logprobs = deferred.logprobs(given.transpose(0, 1).contiguous(), targets)
        (logprobs * weights).sum().backward()
    assert piece.grad is not None
    return logprobs.detach(), piece.grad, max(seen)


def check(tensor: int) -> None:
    hidden, weight, targets, weights = drawn()
    hidden.requires_grad_()
    wanted = (hidden @ weight.T).log_softmax(-1)[:-1].transpose(0, 1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    (wanted * weights).sum().backward()
    assert hidden.grad is not None
    answers = run_on_ranks(tensor, _on_piece, tensor)
    for logprobs, _, most in answers:
        torch.testing.assert_close(logprobs, wanted.detach(), **CLOSE)
        assert most == CHUNK_TOKENS
    torch.testing.assert_close(torch.cat([gradient for _, gradient, _ in answers]), hidden.grad, **CLOSE)


def test_never_more_than_a_chunks_logits_are_there() -> None:
    check(1)


def test_tensor_ranks_with_a_divided_sequence_have_the_results_of_one_rank() -> None:
    check(2)
