"""A generated model of a few hundred kilobytes with a tokenizer, for the demo, for tests and for benchmarks.

The weights are random, but the computation is the same as in a real model. The byte-level tokenizer has the special
tokens of both the Qwen3 and the Llama 3 chat formats as single IDs, and has the chat template of the chosen family.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig
from transformers.models.llama import LlamaForCausalLM
from transformers.models.qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

Family = Literal["qwen3", "llama3", "qwen3-moe"]

QWEN3_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
LLAMA3_TOKENS = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
END_OF_TURN: dict[Family, str] = {"qwen3": "<|im_end|>", "qwen3-moe": "<|im_end|>", "llama3": "<|eot_id|>"}
END_OF_TEXT: dict[Family, str] = {"qwen3": "<|endoftext|>", "qwen3-moe": "<|endoftext|>", "llama3": "<|end_of_text|>"}

CHATML = """\
{%- for tool in tools or [] %}
    {{- '<|im_start|>system\nFunctions that you may call:\n' if loop.first else '' }}
    {{- (tool | tojson) + '\n' + ('<|im_end|>\n' if loop.last else '') }}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {{- '<tool_response>' + message.content + '</tool_response>' if message.role == 'tool' else message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {{- '<think>\n\n</think>\n\n' if enable_thinking is false }}
{%- endif %}"""
"""Tool calls and thoughts in Qwen3's format, so that parsers for Qwen3 can read a tiny model's answers."""
LLAMA3_CHAT = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""
CHAT_TEMPLATES: dict[Family, str] = {"qwen3": CHATML, "qwen3-moe": CHATML, "llama3": LLAMA3_CHAT}


@dataclass(frozen=True, slots=True)
class TinyShape:
    """The sizes of a tiny model. The default has about 0.2 million parameters."""

    hidden_size: int = 64
    intermediate_size: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    vocab_size: int = 512
    max_sequence_length: int = 4096
    tied_embeddings: bool = False
    experts: int = 8
    """The number of experts of a mixture.

    Each token uses two experts, and an expert is half as wide as a dense layer.
    """


def make_tiny_model(
    directory: Path, *, family: Family = "qwen3", shape: TinyShape | None = None, seed: int = 0
) -> Path:
    """Write config, random weights and tokenizer into `directory`. Equal arguments give equal bytes."""
    shape = shape or TinyShape()
    directory.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # a progress bar for one small file is not useful
    tokenizer = _make_tokenizer(family, shape.vocab_size)
    tokenizer.save_pretrained(directory)
    _make_weights(family, shape, seed, tokenizer.eos_token_id).save_pretrained(directory)
    return directory


def _make_weights(family: Family, shape: TinyShape, seed: int, eos_token_id: int) -> PreTrainedModel:
    sizes = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden_size // shape.heads,
        "max_position_embeddings": shape.max_sequence_length,
        "tie_word_embeddings": shape.tied_embeddings,
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        match family:
            case "qwen3":
                return Qwen3ForCausalLM(Qwen3Config(**sizes))
            case "qwen3-moe":
                return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **_expert_sizes(shape)))
            case "llama3":
                return LlamaForCausalLM(LlamaConfig(**sizes))


def _expert_sizes(shape: TinyShape) -> dict[str, object]:
    return {
        "num_experts": shape.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.intermediate_size // 2,
        "norm_topk_prob": True,
    }


def _make_tokenizer(family: Family, vocab_size: int) -> PreTrainedTokenizerFast:
    specials = [*QWEN3_TOKENS, *LLAMA3_TOKENS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 512) - len(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN[family],
        pad_token=END_OF_TEXT[family],
        bos_token="<|begin_of_text|>" if family == "llama3" else None,
        chat_template=CHAT_TEMPLATES[family],
    )


def _corpus() -> Iterator[str]:
    draw = random.Random(0)
    names = ("Ada", "Bob", "Cleo", "Dan", "Eve")
    for _ in range(400):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        yield (
            f"{draw.choice(names)} has {a} apples and buys {b} more. How many apples are there? "
            f"{a}+{b}={a + b}. The answer is {a + b}. User: Assistant: "
        )
