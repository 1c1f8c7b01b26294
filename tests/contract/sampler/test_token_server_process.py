"""A pool's replica that runs vLLM or SGLang: from its start to its end, and when the server is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from support.sampler.jobs import ask, full_logprobs, job, plain_model, prompt_of, random_adapter, submit
from support.sampler.pool_replica import PoolReplica, RemoteSampler
from support.token_server.look_alikes import START_FAILURE, StandInHand, environment_with_look_alikes
from support.waiting import until
from support.worker.pod_process import describe
from tinsmith_trainer.sampling.token_server.base import SOCKET_SCHEME
from tinsmith_trainer.torch_model.loading import TorchModel

PROMPT = prompt_of(20)
NewReplica = Callable[..., PoolReplica]


@pytest.fixture
async def new_replica(tmp_path: Path, model: TorchModel) -> AsyncIterator[NewReplica]:
    """Start a replica of a pool whose servers are stand-ins."""
    replicas: list[PoolReplica] = []

    def start(engine: str, **environment: str) -> PoolReplica:
        folder = tmp_path / f"replica-{len(replicas)}"
        folder.mkdir()
        flags: dict[str, str | None] = {
            "--engine": engine,
            "--scratch": str(folder / "scratch"),
            "--adapter-slots": "2",
            "--max-rank": "16",
        }
        look_alikes = environment_with_look_alikes(folder)
        replica = PoolReplica(folder, flags, environment={**look_alikes, **environment}, model=model.directory)
        replica.start()
        replicas.append(replica)
        return replica

    yield start
    for replica in replicas:
        await replica.discard()


def server_of(replica: PoolReplica) -> psutil.Process:
    assert replica.process is not None
    [leash] = psutil.Process(replica.process.pid).children()
    [server] = leash.children()
    return server


def hand_on(server: psutil.Process) -> StandInHand:
    command = server.cmdline()
    if "--uds" in command:
        return StandInHand(SOCKET_SCHEME + command[command.index("--uds") + 1])
    return StandInHand(f"http://127.0.0.1:{command[command.index('--port') + 1]}")


async def test_a_replica_reads_adapters_from_the_root_and_drains_like_any_other(
    new_replica: NewReplica, model: TorchModel
) -> None:
    replica = new_replica("vllm")
    await asyncio.to_thread(replica.until_ready)
    server = server_of(replica)
    sampler = RemoteSampler(replica, f"file://{replica.folder / 'checkpoints'}", model.info)
    for seed in range(3):  # one more than it keeps
        state = random_adapter(model, rank=4, seed=seed)
        sampler.load_adapter(f"tuned-{seed}", state)
        outcome = await asyncio.to_thread(ask, sampler, job(PROMPT, adapter=f"tuned-{seed}", prompt_logprobs=True))
        assert outcome.prompt_logprobs is not None
        assert abs(outcome.prompt_logprobs[1:] - full_logprobs(plain_model(model, state), PROMPT)).max() < 1e-4
    described = await describe(replica.rpc())
    assert (described.capabilities.engine, described.capabilities.batch_invariant) == ("vllm", False)
    assert described.capabilities.numerics == ""
    assert (described.adapters_used, described.metrics.sampled_tokens) == (2, 3 * 8)
    until(lambda: len(list((replica.folder / "scratch" / "adapters").iterdir())) == 2)

    with hand_on(server).held():
        running = submit(sampler, job(PROMPT, max_tokens=200))
        await asyncio.to_thread(until, lambda: sampler.stats().active == 1)
        replica.signal(signal.SIGTERM)
        await replica.until_status("readiness", serving=False)
    assert len((await asyncio.to_thread(running.get)).sequences[0].tokens) == 200
    status, errors = await replica.ended()
    assert status == 0, errors
    assert not server.is_running()
    assert not (replica.folder / "scratch" / "adapters").exists()
    sampler.close()


async def test_a_server_that_is_lost_ends_the_replica_with_the_reason(new_replica: NewReplica) -> None:
    replica = new_replica("sglang")
    await asyncio.to_thread(replica.until_ready)
    server_of(replica).kill()
    status, _ = await replica.ended()
    assert status == 1
    assert "SGLang ended with status 137. Its last words: " in replica.termination()["message"]


async def test_a_server_that_does_not_start_is_the_reason_of_the_refusal(new_replica: NewReplica) -> None:
    replica = new_replica("vllm", **{START_FAILURE: "CUDA error: no kernel image is available"})
    status, errors = await replica.ended()
    assert status == 3
    assert "vLLM ended with status 1. Its last words: CUDA error: no kernel image is available" in errors
    assert "CUDA error" in replica.termination()["message"]


async def test_a_server_ends_with_a_replica_that_is_killed(new_replica: NewReplica) -> None:
    replica = new_replica("vllm")
    await asyncio.to_thread(replica.until_ready)
    server = server_of(replica)
    replica.signal(signal.SIGKILL)
    until(lambda: _is_gone(server))


def _is_gone(process: psutil.Process) -> bool:
    """Return true if the process has ended. It may be collected at any moment."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
