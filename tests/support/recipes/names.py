"""Models and datasets as the recipes call them; each is a folder of that name in the offline hub."""

from __future__ import annotations

QWEN = "Qwen/Qwen3-8B"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
BASE = "Qwen/Qwen3-8B-Base"
BRIEF = "Qwen/Qwen3.5-4B"
"""Answers a digit in a box, which is right now and then, and ends: what has no limit of its own ends, too, and there is
something to reward. By default several recipes ask for it."""
JUDGE = "Qwen/Qwen3.5-9B"
"""As brief: what plays against the one that learns, or grades it."""
STUDENT = "Qwen/Qwen3.5-9B-Base"
"""Random, and by default asked for by most that train."""
MODELS = (QWEN, LLAMA, BASE, BRIEF, JUDGE, STUDENT)
VOCAB_SIZE = 512
"""Of all: a uniform guess costs ln 512 = 6.24 nats a token."""

CONVERSATIONS = "HuggingFaceH4/no_robots"
MIXTURE = "allenai/tulu-3-sft-mixture"
PREFERENCES = "Anthropic/hh-rlhf"
WORD_PROBLEMS = "openai/gsm8k"
HARD_PROBLEMS = "zwhe99/DeepMath-103K"
REASONING = "open-thoughts/OpenThoughts3-1.2M"
CHAT_FILE = "conversations.jsonl"
FORECASTS_FILE = "forecasts.csv"
DEMONSTRATIONS = "toolalpaca"
"""A folder that `datasets` saved itself."""
