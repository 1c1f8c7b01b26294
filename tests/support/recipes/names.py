"""Models and datasets as the recipes call them; each is a folder of that name in the offline hub."""

from __future__ import annotations

QWEN = "Qwen/Qwen3-8B"
LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
BASE = "Qwen/Qwen3-8B-Base"
BRIEF = "Qwen/Qwen3.5-4B"
"""Answers a digit in a box, which is right now and then, and ends: what has no limit of its own ends, too, and there is
something to reward. By default several recipes ask for it."""
JUDGE = "Qwen/Qwen3.5-9B"
"""The brief model that plays against the learner, or grades it."""
STUDENT = "Qwen/Qwen3.5-9B-Base"
"""Random, and by default asked for by most that train."""
GRADER = "Qwen/Qwen3.6-35B-A3B"
MATH_TEACHER = "Qwen/Qwen3.6-27B"
CHAT_TEACHER = "Qwen/Qwen3.5-397B-A17B"
"""The brief models in place of large ones, which teach and grade by default."""
SEEING = "Qwen/Qwen3-VL-30B-A3B-Instruct"
"""Random, with an image processor."""
MODELS = (QWEN, LLAMA, BASE, BRIEF, JUDGE, STUDENT, GRADER, MATH_TEACHER, CHAT_TEACHER, SEEING)
VOCAB_SIZE = 512
"""The loss of all recipes at the start: a uniform guess costs ln 512 = 6.24 nats a token."""

CONVERSATIONS = "HuggingFaceH4/no_robots"
MIXTURE = "allenai/tulu-3-sft-mixture"
PREFERENCES = "Anthropic/hh-rlhf"
WORD_PROBLEMS = "openai/gsm8k"
HARD_PROBLEMS = "zwhe99/DeepMath-103K"
REASONING = "open-thoughts/OpenThoughts3-1.2M"
PHOTOS = "dpdl-benchmark/caltech101"
CHAT_FILE = "conversations.jsonl"
FORECASTS_FILE = "forecasts.csv"
RUBRIC_FILE, RUBRIC_TEST_FILE = "rubrics.jsonl", "rubrics_of_the_test.jsonl"
RUBRIC_TESTS = 16
SENTENCES = 24
"""The examples of the cookbook's prompt distillation, which has 2,100."""
BENCHMARKS = "benchmarks"
"""A folder with those of self-distillation."""
EXAMPLES, EXAMINATIONS = 32, 8
"""Rows of each."""
DEMONSTRATIONS = "toolalpaca"
"""A folder that `datasets` saved itself."""
