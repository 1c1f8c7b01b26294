"""A working directory in which the model hub's names are folders: programs that load by name find them offline.

transformers and datasets both take a name that is a directory for what it is, before they ask the hub.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
from tinsmith_trainer.torch_model.tiny_model import Family, make_tiny_model

QWEN = "Qwen/Qwen3-8B"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
FAMILIES: Mapping[str, Family] = {QWEN: "qwen3", LLAMA: "llama3"}
VOCAB_SIZE = 512
"""Of both models: a uniform guess costs ln 512 = 6.24 nats a token."""

LLAMA_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""Where tinker-cookbook looks for the tokenizer of every Llama 3 model."""
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")

CONVERSATIONS = "HuggingFaceH4/no_robots"
PREFERENCES = "Anthropic/hh-rlhf"

Row = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OfflineHub:
    """The directory to run programs in."""

    directory: Path

    @property
    def models(self) -> dict[str, Path]:
        """Base models by the name they are served under."""
        return {name: self.directory / name for name in FAMILIES}


def make_offline_hub(directory: Path) -> OfflineHub:
    """Two tiny models with tokenizers, and two datasets large enough for 16 steps of 16 rows."""
    for name, family in FAMILIES.items():
        make_tiny_model(directory / name, family=family)
    tokenizer = directory / LLAMA_TOKENIZER
    tokenizer.mkdir(parents=True)
    for file in TOKENIZER_FILES:
        shutil.copy(directory / LLAMA / file, tokenizer)
    _save_dataset(directory / CONVERSATIONS, train=_conversations(256), test=_conversations(32))
    _save_dataset(directory / PREFERENCES, train=_preferences(256), test=_preferences(32))
    return OfflineHub(directory)


def _save_dataset(directory: Path, **splits: Sequence[Row]) -> None:
    """A dataset repository as the hub lays it out: parquet files, and a card that says which split they are."""
    directory.mkdir(parents=True)
    card = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split, rows in splits.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([*rows]), directory / f"{split}-00000-of-00001.parquet")
        card += [f"  - split: {split}", f"    path: {split}-*"]
    (directory / "README.md").write_text("\n".join([*card, "---", ""]))


def _conversations(count: int) -> list[Row]:
    return [
        {
            "prompt": question,
            "prompt_id": str(index),
            "category": "Chat",
            "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": f"It is {answer}."}],
        }
        for index, (question, answer) in enumerate(_sums(count))
    ]


def _preferences(count: int) -> list[Row]:
    return [
        {
            "chosen": f"\n\nHuman: {question}\n\nAssistant: It is {answer}.",
            "rejected": f"\n\nHuman: {question}\n\nAssistant: No idea at all, sorry.",
        }
        for question, answer in _sums(count)
    ]


def _sums(count: int) -> Iterator[tuple[str, int]]:
    draw = random.Random(count)
    for _ in range(count):
        a, b = draw.randint(1, 9), draw.randint(1, 9)
        name = draw.choice(("Ada", "Bob", "Cleo", "Dan", "Eve"))
        yield f"{name} has {a} apples and buys {b} more. How many apples are there?", a + b
