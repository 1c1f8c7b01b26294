"""A pool's replica finds in a bucket what a worker elsewhere has just saved there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.sampler.jobs import ask, job, prompt_of, random_adapter
from support.sampler.pool_replica import PoolReplica, RemoteSampler
from support.tiny_models import tiny_model

PROMPT = prompt_of(20)


async def test_a_replica_samples_from_adapters_saved_a_moment_ago(bucket: str, tmp_path: Path) -> None:
    model = tiny_model()
    replica = PoolReplica(tmp_path, {"--checkpoint-root": bucket})
    replica.start()
    try:
        await asyncio.to_thread(replica.until_ready)
        sampler = RemoteSampler(replica, bucket, model.info)
        said = []
        for seed in (1, 2):
            sampler.load_adapter(f"adapter-{seed}", random_adapter(model, seed=seed))
            said.append(ask(sampler, job(PROMPT, adapter=f"adapter-{seed}", temperature=0.0)).sequences[0].logprobs)
        assert said[0].tolist() != said[1].tolist()
        sampler.close()
    finally:
        await replica.discard()
