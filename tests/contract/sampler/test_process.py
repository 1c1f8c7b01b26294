"""The sampler as a process of its own: weights from the checkpoint root, no journal, no training."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tinsmith_rpc import wire_pb2, worker_pb2, worker_pb2_grpc
from tinsmith_trainer.checkpoints import CheckpointRoot
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.engines.peft import PeftEngineSettings, build_peft_engine
from tinsmith_trainer.tiny_model import make_tiny_model
from tinsmith_trainer.torch_model.loading import load_torch_model

START_SECONDS = 60.0


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def socket(model_path: Path, root: Path) -> Iterator[str]:
    """The address of a sampler process."""
    socket = f"/tmp/tinsmith-sampler-{os.getpid()}.sock"
    flags = ["--role", "sampler", "--model", str(model_path), "--socket", socket, "--log-level", "error"]
    command = [sys.executable, "-m", "tinsmith_trainer", *flags, "--checkpoint-root", f"file://{root}"]
    process = subprocess.Popen(command)
    yield socket
    process.terminate()
    assert process.wait(START_SECONDS) == 0


@pytest.fixture
async def stub(socket: str) -> AsyncIterator[worker_pb2_grpc.WorkerAsyncStub]:
    async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
        stub: worker_pb2_grpc.WorkerAsyncStub = worker_pb2_grpc.WorkerStub(channel)  # type: ignore[assignment]
        await stub.Describe(worker_pb2.DescribeRequest(), wait_for_ready=True, timeout=START_SECONDS)
        yield stub


def saved_adapter(model_path: Path, root: Path, seq_id: int = 1) -> worker_pb2.AdapterRef:
    """An adapter that differs from the base model, as a worker saves it."""
    engine = build_peft_engine(load_torch_model(str(model_path)), PeftEngineSettings())
    engine.create_adapter("a", LoraSpec(rank=4, alpha=32.0, seed=1))
    fresh = engine.state("a")
    draw = np.random.default_rng(0)
    tensors = {name: draw.normal(size=value.shape).astype(np.float32) * 0.1 for name, value in fresh.tensors.items()}
    state = AdapterState(fresh.lora, 0, tensors)
    written = CheckpointRoot(f"file://{root}").write(
        "s:train:0", seq_id, 1, "sampler", state, engine.base_model(), "ephemeral"
    )
    return worker_pb2.AdapterRef(directory=written.directory, manifest_digest=written.manifest_digest)


async def sample(
    stub: worker_pb2_grpc.WorkerAsyncStub, request_id: str, adapter: worker_pb2.AdapterRef | None = None
) -> worker_pb2.AwaitReply:
    request = worker_pb2.SampleRequest(
        request_id=request_id,
        adapter=adapter,
        prompt_tokens=np.arange(5, dtype="<i4").tobytes(),
        num_samples=1,
        max_tokens=4,
        temperature=0.0,
        top_k=-1,
        top_p=1.0,
        has_stop=True,
    )
    await stub.Sample(request)
    return await stub.AwaitSample(worker_pb2.AwaitSampleRequest(request_id=request_id, timeout_seconds=START_SECONDS))


async def test_it_samples_base_model_and_adapters_from_the_checkpoint_root(
    stub: worker_pb2_grpc.WorkerAsyncStub, model_path: Path, root: Path
) -> None:
    adapter = saved_adapter(model_path, root)
    replies = [await sample(stub, "base"), await sample(stub, "adapted", adapter)]
    responses = [wire_pb2.SampleResponse.FromString(reply.result.payload) for reply in replies]
    assert [len(response.sequences[0].tokens) for response in responses] == [16, 16]
    assert responses[0].sequences[0].logprobs != responses[1].sequences[0].logprobs


async def test_a_damaged_adapter_fails_its_samples_in_words(
    stub: worker_pb2_grpc.WorkerAsyncStub, model_path: Path, root: Path
) -> None:
    adapter = saved_adapter(model_path, root, seq_id=2)
    weights = root / adapter.directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "damaged" in (await sample(stub, "damaged", adapter)).failure.message


async def test_it_trains_nothing(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Submit(worker_pb2.SubmitRequest(epoch=1, model_id="s:train:0"))
    assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_an_id_it_never_saw_is_not_found(stub: worker_pb2_grpc.WorkerAsyncStub) -> None:
    reply = await stub.AwaitSample(worker_pb2.AwaitSampleRequest(request_id="never", timeout_seconds=0))
    assert reply.WhichOneof("state") == "not_found"
