"""Sequences of a packed forward attend to themselves alone, or a model's are not packed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.tiny_models import tiny_model
from tinsmith_trainer.torch_model.attention import blocked_attention
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import wrap_linears
from tinsmith_trainer.torch_model.packing import Packing, packed_hidden_states, packs, varlen_attention
from tinsmith_trainer.torch_model.rows import wrap_activations
from tinsmith_trainer.torch_model.tiny_model import TinyShape
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

LENGTHS = (7, 40, 40, 1, 130)
LONGEST = 512


@pytest.fixture(scope="module")
def model() -> TorchModel:
    return tiny_model(shape=TinyShape(hidden_size=64, intermediate_size=128, layers=2, heads=4, kv_heads=2))


def drawn(count: int) -> Tensor:
    return torch.randint(0, 64, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["qwen3", "llama3"])
def test_packed_sequences_come_out_as_the_model_computes_each_alone(family: str) -> None:
    decoder = tiny_model(family).model.get_decoder()
    tokens = drawn(sum(LENGTHS))
    with torch.no_grad():
        together = packed_hidden_states(decoder, tokens, Packing(LENGTHS))[: len(tokens)]
        for own, packed in zip(torch.split(tokens, LENGTHS), torch.split(together, LENGTHS), strict=True):
            alone = decoder(input_ids=own.unsqueeze(0), use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


def attended_apart(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *_more: object, scale: float, **_options: Any
) -> Tensor:
    """Compute what PyTorch's `varlen_attn` of 2.11 computes, which has no argument for shared key heads."""
    sequences = [torch.tensor_split(states.transpose(0, 1), ends[1:-1].long(), 1) for states in (query, key, value)]
    parts = [
        scaled_dot_product_attention(*own, is_causal=True, scale=scale, enable_gqa=True)
        for own in zip(*sequences, strict=True)
    ]
    return torch.cat(parts, 1).transpose(0, 1)


def attended_with_shared_heads(*states: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    """Compute what `varlen_attn` of later versions computes. Without the argument it refuses shared key heads."""
    assert enable_gqa == (states[0].shape[1] != states[1].shape[1])
    return attended_apart(*states, **options)


@pytest.mark.parametrize("varlen_attn", [attended_apart, attended_with_shared_heads])
@pytest.mark.parametrize("key_heads", [2, 4])
def test_the_attention_of_a_gpu_is_called_as_each_version_of_pytorch_asks(
    monkeypatch: pytest.MonkeyPatch, varlen_attn: Any, key_heads: int
) -> None:
    # PyTorch has this module since 2.10.
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", SimpleNamespace(varlen_attn=varlen_attn))  # type: ignore[arg-type]
    lengths = (3, 16, 20)
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn((sum(lengths), heads, 16), generator=generator) for heads in (4, *[key_heads] * 2)]
    ends = Packing(lengths).ends(torch.device("cpu"))
    found = varlen_attention(*states, ends, max(lengths), scale=0.3)
    expected = blocked_attention(*states, lengths, scale=0.3)[: sum(lengths)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [(3, 16, 20), (64, 65), (127, 128, 130, 130, 200)], ids=str)
def test_attention_by_blocks_is_pytorchs_own(key_heads: int, lengths: tuple[int, ...]) -> None:
    """Forward and backward, next to tokens that belong to no row."""
    generator = torch.Generator().manual_seed(0)
    tokens = Packing(lengths).tokens
    states = [torch.randn((tokens, heads, 16), generator=generator).requires_grad_() for heads in (4, *[key_heads] * 2)]
    weights = torch.randn((tokens, 4, 16), generator=generator)
    by_blocks = blocked_attention(*states, lengths, scale=0.3)
    found = torch.autograd.grad((by_blocks * weights).sum(), states)

    plain = []
    for query, key, value in zip(
        *(torch.split(one[: sum(lengths)].transpose(0, 1), lengths, 1) for one in states), strict=True
    ):
        plain.append(
            scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True).transpose(0, 1)
        )
    own = torch.cat(plain)
    expected = torch.autograd.grad((own * weights[: sum(lengths)]).sum(), states)

    torch.testing.assert_close(by_blocks[: sum(lengths)], own, rtol=0, atol=1e-5)
    assert not by_blocks[sum(lengths) :].any()
    for one, same in zip(found, expected, strict=True):
        torch.testing.assert_close(one, same, rtol=0, atol=1e-4)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
LIKE_LLAMA = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("new_model", "expected"),
    [
        pytest.param(lambda: Qwen3ForCausalLM(Qwen3Config(**LIKE_LLAMA)), True, id="rotary positions"),
        pytest.param(
            lambda: Qwen3ForCausalLM(Qwen3Config(**{**LIKE_LLAMA, "head_dim": 18})), False, id="rows across cache lines"
        ),
        pytest.param(
            lambda: Qwen3ForCausalLM(
                Qwen3Config(**LIKE_LLAMA, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
            ),
            False,
            id="angles that the longest decides",
        ),
        pytest.param(
            lambda: Gemma2ForCausalLM(Gemma2Config(**LIKE_LLAMA, sliding_window=128)), False, id="a short window"
        ),
        pytest.param(lambda: BloomForCausalLM(BloomConfig(**SIZES)), False, id="biases by position"),
        pytest.param(
            lambda: MambaForCausalLM(MambaConfig(**{**SIZES, "state_size": 4})), False, id="a state along the tokens"
        ),
    ],
)
def test_only_models_that_keep_packed_sequences_apart_are_packed(new_model, expected: bool) -> None:
    torch.manual_seed(0)
    assert is_packed(new_model()) is expected


def test_the_angles_of_kinds_of_layers_are_asked_for_as_models_ask() -> None:
    """Gemma 3 has two kinds, and names the one it means."""
    torch.manual_seed(0)
    assert is_packed(Gemma3ForCausalLM(Gemma3TextConfig(**LIKE_LLAMA, sliding_window=1024)))


def is_packed(model: PreTrainedModel) -> bool:
    """Return whether the model is packed, as after loading."""
    wrap_activations(model.eval())
    wrap_linears(model)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return packs(decoder, model.config, LONGEST)
