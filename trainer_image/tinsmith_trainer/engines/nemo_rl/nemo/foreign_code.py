"""Base models that bring programs along are refused: NeMo RL would run them on every rank.

It loads configurations, tokenizers and models with `trust_remote_code=True` and offers no other way
(`finalize_megatron_setup` in `nemo_rl/models/megatron/setup.py`, `import_model_from_hf_name` in
`nemo_rl/models/megatron/community_import.py`). Without programs there is nothing to trust.
"""

from __future__ import annotations

import json
from pathlib import Path

from tinsmith_trainer.errors import ModelDirectoryInvalid

NAMES_CODE = "auto_map"
"""The key by which a configuration names a module, in the directory or in a repository of a hub."""


def check_no_code(directory: Path) -> None:
    """Raises ModelDirectoryInvalid, naming the file."""
    modules = sorted(path.name for path in directory.glob("*.py"))
    naming = sorted(path.name for path in directory.glob("*.json") if _names_code(path))
    if found := [*modules, *naming]:
        raise ModelDirectoryInvalid(
            f"The model in {directory} brings a program along ({', '.join(found)}), which NeMo RL would run on every "
            f"rank. Use a model of a family that transformers has itself, and take these files, or their "
            f"{NAMES_CODE}, away."
        )


def _names_code(file: Path) -> bool:
    """Only objects count: a tokenizer's vocabulary may hold any word."""
    try:
        content = json.loads(file.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError):
        return False
    return isinstance(content, dict) and NAMES_CODE in content
