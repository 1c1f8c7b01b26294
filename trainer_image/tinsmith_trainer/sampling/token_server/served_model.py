"""The properties of a base model that another process has loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import GenerationConfig

from tinsmith_trainer.errors import ModelDirectoryInvalid, ServerError
from tinsmith_trainer.torch_model.architecture import skeleton
from tinsmith_trainer.torch_model.base_model import BaseModelInfo, model_directory
from tinsmith_trainer.torch_model.experts import ExpertProjection, expert_projections
from tinsmith_trainer.torch_model.loading import describe_model, end_of_sequence, load_tokenizer
from tinsmith_trainer.torch_model.stored_weights import checked_config

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model in a server.

    `linear_shapes` are [out, in] by module name. `experts` are the projections of the experts in each layer.
    `eos_token_ids` are all IDs at which a sequence ends by default.
    """

    directory: Path
    info: BaseModelInfo
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    linear_shapes: Mapping[str, tuple[int, int]]
    tied_embeddings: bool
    experts: Mapping[str, ExpertProjection]


def read_model(source: str, revision: str | None = None, max_sequence_length: int | None = None) -> ServedModel:
    """Read the properties from a directory, or from a revision of a hub repository.

    Raises ModelNotFound, ModelDirectoryInvalid, ServerError.
    """
    directory = model_directory(source, revision)
    config = checked_config(directory)
    tokenizer = load_tokenizer(directory)
    try:
        model = skeleton(config)
        has_file = (directory / GENERATION_CONFIG).is_file()
        generation = GenerationConfig.from_pretrained(directory) if has_file else config
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, …
        raise ModelDirectoryInvalid(
            f"The model in {directory} cannot be read: {type(error).__name__}: {error}"
        ) from error
    return ServedModel(
        directory=directory,
        info=_limited(describe_model(source, directory, config), max_sequence_length),
        tokenizer=tokenizer,
        eos_token_ids=end_of_sequence(generation, tokenizer),
        linear_shapes=_linear_shapes(model),
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        experts=expert_projections(model),
    )


def _linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def _limited(info: BaseModelInfo, max_sequence_length: int | None) -> BaseModelInfo:
    if max_sequence_length is None:
        return info
    if max_sequence_length > info.max_sequence_length:
        raise ServerError(
            f"A maximum sequence length of {max_sequence_length} is more than {info.path} was made for, "
            f"which is {info.max_sequence_length} tokens. Give {info.max_sequence_length} or less."
        )
    return replace(info, max_sequence_length=max_sequence_length)
