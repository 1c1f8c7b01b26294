"""A program that runs `tinker_cookbook.eval.benchmarks.run_benchmark` of gsm8k: benchmark.py MODEL."""

from __future__ import annotations

import asyncio
import json
import sys

import tinker
from tinker_cookbook.eval.benchmarks import run_benchmark
from tinker_cookbook.eval.benchmarks._types import BenchmarkConfig
from tinker_cookbook.model_info import get_recommended_renderer_name
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.tokenizer_utils import get_tokenizer

EXAMPLES = 16


async def main(model: str) -> None:
    renderer = get_renderer(get_recommended_renderer_name(model), get_tokenizer(model))
    with tinker.ServiceClient() as client:
        sampler = await client.create_sampling_client_async(base_model=model)
        found = await run_benchmark("gsm8k", sampler, renderer, BenchmarkConfig(max_examples=EXAMPLES))
    print(json.dumps({"examples": found.num_examples, "errors": found.num_errors, "truncated": found.num_truncated}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
