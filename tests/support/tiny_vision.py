"""Tiny models that see, with processors made from their configurations, and pictures for them."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image as PillowImage
from support.sampler.jobs import merged_into
from support.temporary_files import folder_of_whole_run
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.torch_model.base_model import Image
from tinsmith_trainer.torch_model.loading import TorchModel, load_torch_model
from tinsmith_trainer.torch_model.tiny_model import make_tiny_model
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessorPil,
    Gemma3Processor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
)

VisionFamily = Literal["qwen3-vl", "gemma3", "llava", "qwen2.5-vl", "qwen3-vl-moe"]
VISION_FAMILIES: tuple[VisionFamily, ...] = ("qwen3-vl", "gemma3", "llava")
"""Each with a way of its own: positions of three axes and features between layers, a mask both ways, neither."""
ALIKE: tuple[VisionFamily, ...] = ("qwen2.5-vl", "qwen3-vl-moe")

VISION_START, VISION_END, IMAGE_TOKEN, VIDEO_TOKEN = 350, 351, 353, 354
"""The tiny tokenizer's ids of Qwen's tokens, which all families here use."""
IMAGE_TOKEN_NAMES = {"boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>", "image_token": "<|image_pad|>"}

TEXT_SIZES: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TOKENS: Mapping[str, Any] = {"image_token_id": IMAGE_TOKEN, "tie_word_embeddings": False}


@dataclass(frozen=True, slots=True)
class _Parts:
    model: PreTrainedModel
    processor: Any


@functools.cache
def vision_directory(family: VisionFamily = "qwen3-vl") -> Path:
    """Return a model directory, which is removed when the tests end."""
    return make_tiny_vision_model(folder_of_whole_run("tiny-vision-"), family)


def make_tiny_vision_model(folder: Path, family: VisionFamily = "qwen3-vl") -> Path:
    """Write weights, tokenizer and processor, the same ones for the same family."""
    make_tiny_model(folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = _MAKERS[family]()
    parts.model.save_pretrained(folder)
    parts.processor.save_pretrained(folder)
    return folder


@functools.cache
def vision_model(family: VisionFamily = "qwen3-vl") -> TorchModel:
    return load_torch_model(str(vision_directory(family)))


def picture(width: int = 72, height: int = 40, seed: int = 0) -> PillowImage.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return PillowImage.fromarray(pixels)


def encoded(image: PillowImage.Image, kind: Literal["png", "jpeg"] = "png") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def image_at(before_token: int, seed: int = 0, **sizes: int) -> Image:
    return Image(before_token, encoded(picture(seed=seed, **sizes)), "png")


@functools.cache
def plain_processor(family: VisionFamily) -> Any:
    """Return transformers' own processor of text and images, which a hand-written loop would use."""
    tokenizer = AutoTokenizer.from_pretrained(vision_directory(family), extra_special_tokens=IMAGE_TOKEN_NAMES)
    images = AutoImageProcessor.from_pretrained(vision_directory(family), backend="pil")
    match family:
        case "gemma3":
            return Gemma3Processor(images, tokenizer, image_seq_length=4)
        case "llava":
            return LlavaProcessor(images, tokenizer, 8, "default", num_additional_image_tokens=1)
    with pytest.MonkeyPatch.context() as patch:
        # Its processor of videos needs torchvision, and None is no processor.
        patch.setattr(ProcessorMixin, "check_argument_for_proper_class", lambda *_: None)
        return (Qwen2_5_VLProcessor if family == "qwen2.5-vl" else Qwen3VLProcessor)(images, tokenizer, None)


def plain_inputs(family: VisionFamily, prompt: str, *files: bytes) -> Any:
    """Return a forward's inputs for a prompt with a `{}` for each image, by the processor alone."""
    mark = "<|vision_start|>" if family == "gemma3" else "<|vision_start|><|image_pad|><|vision_end|>"
    pictures = [PillowImage.open(io.BytesIO(file)) for file in files]
    text = prompt.format(*[mark for _ in files])
    return plain_processor(family)(text=[text], images=pictures or None, return_tensors="pt")


def plain_vision_model(family: VisionFamily, state: AdapterState | None = None) -> Any:
    """Return transformers' own model, without our layers, with an adapter merged into its weights."""
    model = AutoModelForImageTextToText.from_pretrained(vision_directory(family), dtype=torch.float32).eval()
    return model if state is None else merged_into(model, state)


def split_tokens(ids: NDArray[np.int64], *files: bytes) -> tuple[NDArray[np.int32], tuple[Image, ...]]:
    """Split a processor's tokens as the SDK sends them: those of the text, and images between them."""
    is_image = ids == IMAGE_TOKEN
    starts = np.flatnonzero(is_image & ~np.roll(is_image, 1))
    kinds = ["png" if file.startswith(b"\x89PNG") else "jpeg" for file in files]
    befores = [int((~is_image[:start]).sum()) for start in starts]
    images = tuple(Image(*parts) for parts in zip(befores, files, kinds, strict=True))
    return ids[~is_image].astype(np.int32), images


QWEN_TEXT = {**TEXT_SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
QWEN_VISION: Mapping[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8},
    **{"spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 64},
}
DEEPSTACK = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
QWEN_TOKENS: Mapping[str, Any] = {
    **TOKENS,
    **{"video_token_id": VIDEO_TOKEN, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END},
}


def _qwen3_vl() -> _Parts:
    config = Qwen3VLConfig(text_config=QWEN_TEXT, vision_config={**QWEN_VISION, **DEEPSTACK}, **QWEN_TOKENS)
    return _Parts(Qwen3VLForConditionalGeneration(config), _patch_processor())


def _qwen3_vl_moe() -> _Parts:
    config = Qwen3VLMoeConfig(
        text_config={**QWEN_TEXT, **EXPERTS}, vision_config={**QWEN_VISION, **DEEPSTACK}, **QWEN_TOKENS
    )
    return _Parts(Qwen3VLMoeForConditionalGeneration(config), _patch_processor())


def _qwen2_5_vl() -> _Parts:
    windows = {"window_size": 32, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config={**QWEN_VISION, **windows}, **QWEN_TOKENS)
    return _Parts(Qwen2_5_VLForConditionalGeneration(config), _patch_processor())


def _patch_processor() -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    )


def _gemma3() -> _Parts:
    config = Gemma3Config(
        text_config={**TEXT_SIZES, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 32, "patch_size": 8},
        },
        mm_tokens_per_image=4,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
        **TOKENS,
    )
    processor = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    return _Parts(Gemma3ForConditionalGeneration(config), processor)


def _llava() -> _Parts:
    config = LlavaConfig(
        text_config={"model_type": "llama", **TEXT_SIZES},
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
            projection_dim=32,
        ),
        **TOKENS,
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return _Parts(LlavaForConditionalGeneration(config), processor)


_MAKERS = {
    "qwen3-vl": _qwen3_vl,
    "gemma3": _gemma3,
    "llava": _llava,
    "qwen2.5-vl": _qwen2_5_vl,
    "qwen3-vl-moe": _qwen3_vl_moe,
}
