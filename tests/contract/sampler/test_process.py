"""A replica of a pool, as a process behind mutual TLS: weights from the checkpoint root, no journal, no training."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypeAlias

import grpc
import pytest
from support.sampler.jobs import SMALL_SETTINGS, ask, bits, job, prompt_of, random_adapter
from support.sampler.pool_replica import PoolReplica, RemoteSampler, decode_outcome, sample_request
from support.worker.pod_process import describe
from support.worker.process import AWAIT_SECONDS, START_SECONDS
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.shared_saves import SaveSocket
from tinsmith_trainer.sampling.builtin import BuiltinSampler, BuiltinSamplerSettings
from tinsmith_trainer.torch_model.loading import TorchModel

PROMPT = prompt_of(20)
Stub: TypeAlias = "worker_pb2_grpc.WorkerAsyncStub"


@pytest.fixture
async def stub(replica: PoolReplica) -> AsyncIterator[Stub]:
    async with grpc.aio.secure_channel(replica.address, replica.credentials(), replica.channel_options) as channel:
        yield worker_pb2_grpc.WorkerStub(channel)  # type: ignore[misc]


@pytest.fixture
def saves_socket() -> Iterator[Path]:
    """Return a socket outside of the test's folder: its path has at most 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, "saves")


@pytest.fixture
async def own_replica(tmp_path: Path, model: TorchModel, saves_socket: Path) -> AsyncIterator[PoolReplica]:
    """Return a replica of the test's own, with memory for two adapters, and a place for a worker on its machine."""
    flags: dict[str, str | None] = {
        "--adapter-slots": "2",
        "--max-rank": "16",
        "--saves-socket": str(saves_socket),
    }
    replica = PoolReplica(tmp_path, flags, model=model.directory)
    replica.start()
    try:
        await asyncio.to_thread(replica.until_ready)
        yield replica
    finally:
        await replica.discard()


def save(replica: PoolReplica, model: TorchModel, seed: int, rank: int = 4) -> worker_pb2.AdapterRef:
    root = CheckpointRoot(f"file://{replica.folder / 'checkpoints'}")
    state = random_adapter(model, rank=rank, seed=seed)
    written = root.write("s:train:0", seed, 1, "sampler", state, model.info, "ephemeral")
    return worker_pb2.AdapterRef(directory=written.directory, manifest_digest=written.manifest_digest)


async def sample(
    stub: Stub, request_id: str, adapter: worker_pb2.AdapterRef | None = None, max_tokens: int = 8
) -> None:
    asked = job(PROMPT, request_id=request_id, max_tokens=max_tokens)
    await stub.Sample(sample_request(asked, adapter), timeout=AWAIT_SECONDS)


async def result(stub: Stub, request_id: str, timeout: float = AWAIT_SECONDS) -> worker_pb2.AwaitReply:
    return await stub.AwaitSample(worker_pb2.AwaitSampleRequest(request_id=request_id, timeout_seconds=timeout))


def test_a_pool_draws_bit_for_bit_the_samples_of_a_colocated_sampler(replica: PoolReplica, model: TorchModel) -> None:
    root = f"file://{replica.folder / 'checkpoints'}"
    afar = RemoteSampler(replica, root, model.info)
    here = BuiltinSampler(model, BuiltinSamplerSettings(deterministic=True, **SMALL_SETTINGS))
    try:
        for sampler in (afar, here):
            sampler.load_adapter("tuned", random_adapter(model, seed=4))
        for key in ("", "tuned"):
            # Another prompt for each: how much of it was cached is part of the answer.
            asked = job(prompt_of(33, seed=77), adapter=key, num_samples=3, prompt_logprobs=True)
            assert bits(ask(afar, asked)) == bits(ask(here, asked))
    finally:
        afar.close()
        here.close()


async def test_a_checkpoint_that_was_altered_fails_its_samples_with_a_message(
    stub: Stub, replica: PoolReplica, model: TorchModel
) -> None:
    adapter = save(replica, model, seed=1)
    weights = replica.folder / "checkpoints" / adapter.directory / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    await sample(stub, "altered", adapter)
    failure = (await result(stub, "altered")).failure
    assert (failure.category, "is damaged" in failure.message) == (worker_pb2.USER, True)


async def test_an_adapter_saved_a_moment_ago_is_found(stub: Stub, replica: PoolReplica, model: TorchModel) -> None:
    """Earlier listings and reads must not hide it."""
    for seed in (10, 11):
        await sample(stub, f"fresh-{seed}", save(replica, model, seed))
        assert (await result(stub, f"fresh-{seed}")).HasField("result")


async def test_an_adapter_that_is_announced_is_in_memory_before_a_sample_names_it(
    own_replica: PoolReplica, model: TorchModel
) -> None:
    stub = own_replica.rpc()
    adapter = save(own_replica, model, seed=1)
    await stub.Prepare(worker_pb2.PrepareRequest(adapter=adapter), timeout=AWAIT_SECONDS)
    assert (await describe(stub)).adapters_used == 1
    await sample(stub, "announced", adapter)
    assert (await result(stub, "announced")).HasField("result")
    missing = worker_pb2.AdapterRef(directory="ephemeral/never", manifest_digest="0")
    await stub.Prepare(worker_pb2.PrepareRequest(adapter=missing), timeout=AWAIT_SECONDS)
    own_replica.signal(signal.SIGTERM)
    status, errors = await own_replica.ended()
    assert status == 0, errors


async def test_weights_from_the_local_worker_give_the_same_samples_as_weights_from_the_root(
    own_replica: PoolReplica, model: TorchModel, saves_socket: Path
) -> None:
    stub, door = own_replica.rpc(), SaveSocket(saves_socket)
    with door.saves.copying(random_adapter(model, rank=4, seed=1), model.info.revision) as written:
        written("shared")
    shared = worker_pb2.AdapterRef(directory="ephemeral/never", manifest_digest="shared")
    await sample(stub, "from-the-worker", shared)
    await sample(stub, "from-the-root", save(own_replica, model, seed=1))
    drawn = [
        decode_outcome((await result(stub, which)).result.payload) for which in ("from-the-worker", "from-the-root")
    ]
    assert bits(drawn[0]) == bits(drawn[1])
    door.close()


async def test_it_trains_nothing_and_keeps_nothing(stub: Stub) -> None:
    for call, message in (
        (stub.Submit, worker_pb2.SubmitRequest(epoch=1, model_id="s:train:0")),
        (stub.Activate, worker_pb2.ActivateRequest(epoch=1)),
        (stub.Snapshot, worker_pb2.SnapshotRequest()),
        (stub.Events, worker_pb2.EventsRequest()),
        (stub.Await, worker_pb2.AwaitRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await call(message, timeout=AWAIT_SECONDS)  # type: ignore[operator]
        assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_describe_returns_the_identity_and_the_models_in_memory(
    own_replica: PoolReplica, model: TorchModel
) -> None:
    stub = own_replica.rpc()
    for seed in (1, 2, 3):
        await sample(stub, f"sample-{seed}", save(own_replica, model, seed))
        assert (await result(stub, f"sample-{seed}")).HasField("result")
    described = await describe(stub)
    assert (described.worker_id, described.model_name, described.epoch) == (own_replica.worker_id, "some/model", 0)
    assert (described.adapters_used, described.capabilities.adapter_slots) == (2, 2)
    assert (described.capabilities.engine, described.capabilities.max_rank) == ("builtin", 16)
    assert described.capabilities.sampling == "keys and values"
    assert described.base_model.max_sequence_length == model.info.max_sequence_length
    assert described.metrics.sampled_tokens == 3 * 8
    assert (described.metrics.samples_active, described.metrics.samples_waiting) == (0, 0)
    assert described.metrics.oldest_sample_seconds == 0 < described.metrics.sampled_tokens_per_second
    assert not described.draining
    await sample(stub, "wide", save(own_replica, model, 4, rank=17))
    assert "rank 17; this sampler's limit is 16" in (await result(stub, "wide")).failure.message


async def test_a_stop_refuses_new_work_and_loses_no_accepted_work(own_replica: PoolReplica) -> None:
    stub = own_replica.rpc()
    taken = [f"taken-{number}" for number in range(12)]
    for request_id in taken:
        await sample(stub, request_id, max_tokens=900)
    own_replica.signal(signal.SIGTERM)
    await own_replica.until_status("readiness", serving=False)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await sample(stub, "new")
    assert refusal.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "takes no more samples" in (refusal.value.details() or "")
    await sample(stub, taken[0])  # its acknowledgement may have been lost
    assert (await describe(stub)).draining
    assert (await result(stub, taken[-1], timeout=0)).HasField("pending")

    replies = await asyncio.gather(*(result(stub, request_id, timeout=START_SECONDS) for request_id in taken))
    lengths = [len(decode_outcome(reply.result.payload).sequences[0].tokens) for reply in replies]
    assert lengths == [900] * len(taken)
    status, errors = await own_replica.ended()
    assert status == 0, errors
