"""Where the SDK looks for a model's tokenizer. It never asks the server for one."""

from __future__ import annotations

from pathlib import Path

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt")
"""One of them is there. Of tokenizer_config.json alone, transformers makes an empty tokenizer without a word."""

LLAMA_3_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"


def tokenizer_id(model_name: str) -> str:
    """The directory or hub repository that the SDK turns a base model's name into, as of 0.38."""
    name = model_name.partition(":")[0]
    if name.startswith("meta-llama/Llama-3"):
        return LLAMA_3_TOKENIZER
    if name.count("/") == 2:
        return name.rpartition("/")[0]
    return name


def find_tokenizer(identifier: str) -> Path | None:
    """The folder that transformers would load it from without a download: a directory, or the hub's cache."""
    directory = Path(identifier)
    if directory.is_dir():
        return directory if any((directory / name).is_file() for name in VOCABULARY_FILES) else None
    return _find_in_hub_cache(identifier)


def _find_in_hub_cache(repository: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in VOCABULARY_FILES:
        try:
            found = try_to_load_from_cache(repository, name)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None
