"""Adapters from a worker's pod to a sampler's, each a process behind mutual TLS; the root only where that fails."""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from support.certificates import SERVER, mount_secret
from support.sampler.jobs import SMALL_SETTINGS, ask, bits, job, prompt_of
from support.sampler.pool_replica import PoolReplica, decode_outcome, sample_request
from support.worker.pod_process import PodProcess, describe
from support.worker.pod_worker import PodWorker
from support.worker.process import AWAIT_SECONDS, START_SECONDS, create, save_ephemeral, step, train
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import TorchModel

PROMPT = prompt_of(20)
TRAINED = (create(), train(1), step(2))
Stub: TypeAlias = "worker_pb2_grpc.WorkerAsyncStub"
Ways: TypeAlias = "tuple[dict[str, int], dict[str, int]]"
"""The numbers of adapters taken, by way, and of failed streams, by reason."""


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory, replica: PoolReplica, model: TorchModel) -> Iterator[PodWorker]:
    """Return a worker in the replica's namespace: of the same authority, on the same checkpoint root."""
    flags: dict[str, str | None] = {
        "--model": model.directory,
        "--engine": "peft",
        "--no-sampling": None,
        "--checkpoint-root": f"file://{replica.folder / 'checkpoints'}",
    }
    trainer = PodWorker(tmp_path_factory.mktemp("trainer"), flags, authority=replica.authority)
    trainer.start()
    yield trainer
    asyncio.run(trainer.discard())


@dataclass
class Pods:
    """A worker that has trained, and a sampler that others have used."""

    trainer: PodWorker
    replica: PoolReplica
    worker: Stub
    sampler: Stub
    before: Ways = ({}, {})

    async def saved(self, number: int) -> worker_pb2.AdapterRef:
        """Return the adapter's reference, as an API server names it to the sampler."""
        await self.trainer.submit(self.worker, *TRAINED, save_ephemeral(number))
        events = (await self.worker.Events(worker_pb2.EventsRequest(timeout_seconds=AWAIT_SECONDS))).events
        [saved] = await self._event_of(number, list(events))
        source = worker_pb2.SaveSource(
            target=self.trainer.address, worker_id=self.trainer.worker_id, size_bytes=saved.size_bytes
        )
        return worker_pb2.AdapterRef(directory=saved.directory, manifest_digest=saved.manifest_digest, source=source)

    async def _event_of(self, number: int, events: list[worker_pb2.Event]) -> list[worker_pb2.CheckpointSaved]:
        async with asyncio.timeout(AWAIT_SECONDS):
            while True:
                saved = [event.checkpoint_saved for event in events if event.checkpoint_saved.seq_id == number]
                if saved:
                    return saved
                after = worker_pb2.EventsRequest(after_event_id=events[-1].event_id, timeout_seconds=AWAIT_SECONDS)
                events += (await self.worker.Events(after)).events

    async def drawn(self, adapter: worker_pb2.AdapterRef) -> str:
        request_id = f"of-{adapter.manifest_digest}"
        asked = sample_request(job(PROMPT, request_id=request_id), adapter)
        await self.sampler.Sample(asked, timeout=AWAIT_SECONDS)
        waiting = worker_pb2.AwaitSampleRequest(request_id=request_id, timeout_seconds=AWAIT_SECONDS)
        reply = await self.sampler.AwaitSample(waiting)
        assert reply.HasField("result"), reply
        return bits(decode_outcome(reply.result.payload))

    async def ways(self) -> Ways:
        """Return the counts since the test began."""
        metrics = (await describe(self.sampler)).metrics
        return since(self.before[0], metrics.adapters_taken), since(self.before[1], metrics.streams_failed)


def since(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name, 0)}


def channel_to(process: PodProcess) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(process.address, process.credentials(), process.channel_options)


@pytest.fixture
async def pods(trainer: PodWorker, replica: PoolReplica) -> AsyncIterator[Pods]:
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel_to(process)) for process in (trainer, replica)]
        worker, sampler = (worker_pb2_grpc.WorkerStub(channel) for channel in channels)
        pods = Pods(trainer, replica, worker, sampler)  # type: ignore[arg-type]
        await activate(pods)
        pods.before = await pods.ways()
        yield pods


async def activate(pods: Pods) -> None:
    request = worker_pb2.ActivateRequest(epoch=pods.trainer.epoch)
    await pods.worker.Activate(request, wait_for_ready=True, timeout=START_SECONDS)


def drawn_here(model: TorchModel, root: Path, adapter: worker_pb2.AdapterRef) -> str:
    """Sample from the adapter on the root."""
    sampler = BuiltinSampler(model, BuiltinSamplerSettings(deterministic=True, **SMALL_SETTINGS))
    state = CheckpointRoot(f"file://{root}").read(adapter.directory, adapter.manifest_digest, model.info).state
    try:
        sampler.load_adapter("saved", state)
        return bits(ask(sampler, job(PROMPT, adapter="saved")))
    finally:
        sampler.close()


async def test_a_streamed_save_equals_the_save_on_the_root_which_is_not_read(pods: Pods, model: TorchModel) -> None:
    assert (await describe(pods.worker)).streams_saves
    assert (await describe(pods.sampler)).streams_saves
    adapter, root = await pods.saved(3), pods.replica.folder / "checkpoints"
    expected = await asyncio.to_thread(drawn_here, model, root, adapter)
    shutil.rmtree(root / adapter.directory)
    assert await pods.drawn(adapter) == expected
    assert await pods.ways() == ({"stream": 1}, {})


async def test_a_worker_of_another_identity_than_was_named_is_given_no_call(pods: Pods) -> None:
    adapter = await pods.saved(4)
    adapter.source.target = adapter.source.target.replace("127.0.0.1", "localhost")  # this one is avoided from now on
    adapter.source.worker_id = "another"
    await pods.drawn(adapter)
    assert await pods.ways() == ({"root": 1}, {"unreachable": 1})


async def test_a_sampler_gives_no_saves(pods: Pods) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await anext(aiter(pods.sampler.StreamSave(worker_pb2.StreamSaveRequest(manifest_digest="0"))))
    assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_a_save_of_a_worker_that_was_killed_or_started_again_is_read_from_the_root(pods: Pods) -> None:
    first, second = await pods.saved(5), await pods.saved(6)
    pods.trainer.signal(signal.SIGKILL)
    await pods.trainer.ended()
    first.source.target = first.source.target.replace("127.0.0.1", "127.0.0.2")  # likewise; no worker listens there
    await pods.drawn(first)
    assert await pods.ways() == ({"root": 1}, {"unreachable": 1})
    pods.trainer.start()
    await activate(pods)
    await pods.drawn(second)
    assert await pods.ways() == ({"root": 2}, {"unreachable": 1, "not_kept": 1})


async def test_a_sampler_without_a_client_certificate_reads_the_root(pods: Pods) -> None:
    """The operator of its pool may not have issued another certificate yet."""
    adapter, replica = await pods.saved(7), pods.replica
    mount_secret(replica.secret, replica.authority.leaf(replica.name, usages=(SERVER,)), replica.authority)
    try:
        await pods.drawn(adapter)
    finally:
        mount_secret(replica.secret, replica.own_leaf(), replica.authority)
    assert await pods.ways() == ({"root": 1}, {"unreachable": 1})
