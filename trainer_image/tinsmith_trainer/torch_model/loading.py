"""Loading of a base model from a directory or the hub: weights, tokenizer and identity.

Error messages name the file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_default_handler, disable_progress_bar, enable_propagation

from tinsmith_trainer.errors import ModelDirectoryInvalid, is_out_of_memory
from tinsmith_trainer.torch_model.architecture import LogitTransform, auto_class, logit_transform_of
from tinsmith_trainer.torch_model.base_model import BaseModelInfo, Quantization, model_directory
from tinsmith_trainer.torch_model.device import SharedDevice, WarmMemory
from tinsmith_trainer.torch_model.experts import ExpertProjection, adapt_experts, unadaptable_experts
from tinsmith_trainer.torch_model.lora import UNEMBED_NAME, StackedLoraLinear, module_family, wrap_linears
from tinsmith_trainer.torch_model.norms import fuse_norms
from tinsmith_trainer.torch_model.quantization import dequantizing, quantize, stored_format, widen
from tinsmith_trainer.torch_model.rows import wrap_activations
from tinsmith_trainer.torch_model.stored_weights import blame, checked_config
from tinsmith_trainer.torch_model.vision import Vision, vision_of

log = structlog.get_logger(__name__)

IDENTITY_PATTERNS = ("config.json", "*.safetensors", "*.safetensors.index.json", "*.bin")
DEFAULT_MAX_SEQUENCE_LENGTH = 2048
SMALLEST_VOCABULARY = 16


LoraLayer = StackedLoraLinear | ExpertProjection
"""A layer that an adapter may change: a linear layer, or one projection of all experts in a layer."""


@dataclass(slots=True)
class TorchModel:
    """Frozen base weights with LoRA layers, the tokenizer, and the device with its turns.

    `layers` are the layers that an adapter may change; `frozen_layers` are the names of all other layers. By default,
    generation ends at any of `eos_token_ids`.
    """

    model: PreTrainedModel
    tokenizer: Any
    directory: Path
    info: BaseModelInfo
    layers: dict[str, LoraLayer]
    eos_token_ids: tuple[int, ...]
    shared_device: SharedDevice
    frozen_layers: tuple[str, ...] = ()
    frozen_experts: tuple[str, ...] = ()
    """The names of layers with experts in a form that no adapter supports."""
    logit_transform: LogitTransform = LogitTransform()
    """The transform of the output projection's logits."""
    vision: Vision | None = None
    """The image inputs of the model, or None for a model that takes only text."""
    memory: WarmMemory = field(default_factory=WarmMemory)
    """Memory for a microbatch of the engine, until its backward ends."""

    @property
    def device(self) -> torch.device:
        return self.shared_device.device

    @property
    def decoder(self) -> Any:
        """The model's layers without the output projection."""
        found = self.model.get_decoder()
        # For a text model with a multimodal model's names, transformers returns the whole model.
        return getattr(found, "model", found) if found is self.model else found

    @property
    def unembed(self) -> StackedLoraLinear:
        """The output projection. Raises KeyError if the model has no output projection."""
        layer = self.layers[UNEMBED_NAME]
        assert isinstance(layer, StackedLoraLinear)
        return layer


def explain_non_finite(torch_model: TorchModel) -> str:
    """Explain why a model computes infinite numbers or NaN, and what the user can do."""
    weights = torch_model.model.named_parameters()
    named = next((name for name, weight in weights if not weight.isfinite().all()), None)
    path, dtype = torch_model.info.path, str(torch_model.model.dtype).removeprefix("torch.")
    if named is not None:
        return (
            f"{path} computes numbers that are not finite: its weight {named} holds NaN or infinity. Copy the model's "
            "files again, or save the model again from finite weights."
        )
    return (
        f"{path} computes numbers that are not finite in {dtype}, though its weights are finite. Serve it with --dtype "
        "float32, or check that config.json is the one that the weights were trained with."
    )


def load_torch_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    quantization: Quantization | None = None,
) -> TorchModel:
    """Load a model from a directory, or from a revision of a hub repository that is cached or reachable.

    Weights that are stored quantized in the checkpoint are unpacked first, and quantized again if `quantization` is
    set.

    Raises ModelNotFound, or ModelDirectoryInvalid with the file or the tensors that are invalid.
    """
    disable_progress_bar()
    disable_default_handler()  # use our log format instead
    enable_propagation()
    directory = model_directory(source, revision)
    config = checked_config(directory)
    try:
        model = auto_class(config).from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            attn_implementation=attention_for(config),
            **dequantizing(directory, config),
        )
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, SafetensorError, …
        if is_out_of_memory(error):
            raise
        raise ModelDirectoryInvalid(blame(directory, error)) from error
    if stored := stored_format(config):
        widen(model, dtype)
        log.info("unpacked the checkpoint's quantized weights", format=stored, directory=str(directory))
    if quantization is not None:
        quantize(model.get_decoder(), quantization)
        log.info("quantized the base weights", bits=quantization, model=source)
    linears = {name: layer for name, layer in wrap_linears(model).items() if is_of_text(model, name)}
    model = model.to(device).eval().requires_grad_(False)
    # By default cuDNN rounds the float32 of a vision tower's convolutions to ten bits.
    torch.backends.cudnn.allow_tf32 = False
    if device == "cpu":
        wrap_activations(model)
    else:
        log.info("fused the norms", count=fuse_norms(model))
    tokenizer = load_tokenizer(directory)
    shared_device = SharedDevice(torch.device(device))
    shared_device.offer_between(getattr(model.get_decoder(), "layers", ()))
    return TorchModel(
        model=model,
        tokenizer=tokenizer,
        directory=directory,
        info=replace(describe_model(source, directory, config), quantization=quantization or ""),
        layers={
            **{name: layer for name, layer in linears.items() if module_family(name) is not None},
            **adapt_experts(model),
        },
        frozen_layers=tuple(name for name in linears if module_family(name) is None),
        eos_token_ids=end_of_sequence(getattr(model, "generation_config", None), tokenizer),
        shared_device=shared_device,
        frozen_experts=unadaptable_experts(model),
        logit_transform=logit_transform_of(config),
        vision=vision_of(model, directory),
    )


def is_of_text(model: PreTrainedModel, name: str) -> bool:
    """Return whether a layer belongs to the decoder or the output projection. A vision tower is never changed."""
    decoder = model.get_decoder()
    prefix = next((own for own, module in model.named_modules() if module is decoder), "")
    return name == UNEMBED_NAME or name.startswith(f"{prefix}." if prefix else "")


def attention_for(config: Any) -> str:
    """Return the attention implementation of an architecture.

    The implementation is PyTorch's kernel. If the kernel does not support the architecture (with sinks or capped
    scores), the implementation is plain products.
    """
    architecture = auto_class(config)._model_mapping.get(type(config), None)
    if architecture is None or architecture._supports_sdpa:
        return "sdpa"
    log.info(
        "attention uses plain products: PyTorch's kernel does not support the architecture", model=architecture.__name__
    )
    return "eager"


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory. Raises ModelDirectoryInvalid."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        raise ModelDirectoryInvalid(f"The tokenizer in {directory} cannot be loaded: {error}.") from error
    if len(tokenizer) < SMALLEST_VOCABULARY:
        # Without its files transformers creates an empty tokenizer, and stop strings would never match.
        raise ModelDirectoryInvalid(f"{directory} has no tokenizer: expected tokenizer.json next to config.json.")
    return tokenizer


def describe_model(source: str, directory: Path, config: Any) -> BaseModelInfo:
    """Return the properties of a model that can be read without loading weights."""
    text_config = config.get_text_config()
    return BaseModelInfo(
        path=source,
        architecture=(config.architectures or [type(config).__name__])[0],
        revision=files_digest(directory),
        vocab_size=text_config.vocab_size,
        max_sequence_length=getattr(text_config, "max_position_embeddings", DEFAULT_MAX_SEQUENCE_LENGTH),
        stored_as=stored_format(config),
        directory=str(directory),
    )


def files_digest(directory: Path) -> str:
    """Return the SHA-256 of the names and contents of the files that determine the weights."""
    digest = hashlib.sha256()
    for path in sorted({path for pattern in IDENTITY_PATTERNS for path in directory.glob(pattern)}):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name}\0{content}\n".encode())
    return digest.hexdigest()


def end_of_sequence(generation: Any, tokenizer: Any) -> tuple[int, ...]:
    """Return all token IDs at which generation ends by default. `generation` is a GenerationConfig or None."""
    declared = getattr(generation, "eos_token_id", None)
    ids = declared if isinstance(declared, list) else [declared]
    return tuple(sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None}))
