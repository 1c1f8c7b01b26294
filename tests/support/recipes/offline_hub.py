"""A working directory in which the model hub's names are folders: programs that load by name find them offline.

transformers and datasets both take a name that is a directory for what it is, before they ask the hub.
"""

from __future__ import annotations

import math
import shutil
from importlib.resources import files
from pathlib import Path

import torch
from support.recipes.datasets_of_hub import make_datasets
from support.recipes.names import BRIEF, CHAT_TEACHER, GRADER, JUDGE, LLAMA, MATH_TEACHER, MODELS, SEEING, SENTENCES
from support.tiny_vision import make_tiny_vision_model
from tinsmith_trainer.torch_model.tiny_model import Family, TinyShape, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

BRIEF_ONES = (BRIEF, JUDGE, GRADER, MATH_TEACHER, CHAT_TEACHER)
SHAPE = TinyShape(max_sequence_length=16_384)
"""The length of the context: some recipes ask for 4,096 tokens in addition to their prompt."""
SHARE_THAT_ENDS = 0.25
"""The probabilities of next tokens without a fixed successor."""
BOX = r"\boxed{"
BEFORE_AN_ANSWER = ("\n", "\n\n", "</think>\n\n")
"""The endings of prompts."""
CERTAIN_LOGIT = 12.0
"""The value of a logit among some 500 tokens whose logits are about 0."""

LLAMA_TOKENIZER = "thinkingmachineslabinc/meta-llama-3-instruct-tokenizer"
"""The name under which tinker-cookbook looks for the tokenizer of every Llama 3 model."""
TOKENIZER_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")


def make_offline_hub(directory: Path) -> None:
    """Tiny models with tokenizers, and datasets large enough for what is run."""
    for seed, name in enumerate(MODELS):
        if name == SEEING:
            make_tiny_vision_model(directory / name)
        elif name in BRIEF_ONES:
            make_brief_model(directory / name, seed=seed)
        else:
            family: Family = "llama3" if name == LLAMA else "qwen3"
            make_tiny_model(directory / name, family=family, shape=SHAPE, seed=seed)
    tokenizer = directory / LLAMA_TOKENIZER
    tokenizer.mkdir(parents=True)
    for file in TOKENIZER_FILES:
        shutil.copy(directory / LLAMA / file, tokenizer)
    make_datasets(directory)
    # Recipes read and write examples by a path that is relative to the cookbook's checkout.
    examples = files("tinker_cookbook") / "example_data"
    copied = directory / "tinker_cookbook" / "example_data"
    shutil.copytree(str(examples), copied)
    sentences = copied / "multilingual.txt"
    sentences.write_text("".join(sentences.read_text().splitlines(keepends=True)[:SENTENCES]))


def make_brief_model(directory: Path, *, seed: int = 0) -> None:
    """Make a random model that says BOX, a digit and the end of its turn, or else ends after a few tokens.

    Embedding values that are far larger than the others reach the end of the residual stream unchanged: the first
    exists for every token, and there is one more for each token that another has to follow.
    """
    make_tiny_model(directory, family="qwen3", shape=SHAPE, seed=seed)
    model = AutoModelForCausalLM.from_pretrained(directory)
    chain = _chain(AutoTokenizer.from_pretrained(directory))
    head, embeddings = model.lm_head.weight, model.model.embed_tokens.weight
    words, width = head.shape
    with torch.no_grad():
        embeddings[:, 0] = 1.0
        head[:, : len(chain) + 1] = 0.0
        head[model.config.eos_token_id, 0] = math.log(SHARE_THAT_ENDS / (1 - SHARE_THAT_ENDS) * words) / width**0.5
        for place, (tokens, followers) in enumerate(chain, start=1):
            embeddings[tokens, place] = 1.0
            # The norm makes the width's root of a vector's length, which has two such numbers.
            head[followers, place] = CERTAIN_LOGIT / (width / 2) ** 0.5
    model.save_pretrained(directory)


def _chain(tokenizer: PreTrainedTokenizerBase) -> list[tuple[list[int], list[int]]]:
    """Return which tokens follow which."""
    box = tokenizer.encode(BOX, add_special_tokens=False)
    digits = tokenizer.convert_tokens_to_ids([*"123456789"])
    closing = tokenizer.convert_tokens_to_ids("}")
    openings = sorted({tokenizer.encode(text, add_special_tokens=False)[-1] for text in BEFORE_AN_ANSWER})
    links = [[token] for token in box]
    spelled = zip([openings, *links], [*links, digits], strict=True)
    return [*spelled, (digits, [closing]), ([closing], [tokenizer.eos_token_id])]
