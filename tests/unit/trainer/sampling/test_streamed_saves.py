"""Saves from a worker's memory: what its manifest says and nothing else, or else a reason to read the root."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from support.engine.reference import ReferenceEngine
from tinsmith_rpc import worker_pb2, worker_pb2_grpc
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot, SavedWeights
from tinsmith_trainer.checkpoints.offered_saves import OfferedSaves
from tinsmith_trainer.engines.base import AdapterState, LoraSpec
from tinsmith_trainer.errors import ServerError
from tinsmith_trainer.sampling import streamed_saves
from tinsmith_trainer.sampling.streamed_saves import AVOIDED_SECONDS, StreamedSaves, StreamFailed, patience
from tinsmith_trainer.sampling.weight_sources import WeightSources
from tinsmith_trainer.torch_model.base_model import BaseModelInfo

BASE = ReferenceEngine().base_model()
Part = worker_pb2.SavePart


@dataclass
class Trainer(worker_pb2_grpc.WorkerServicer):
    """Gives what it has saved, or whatever `parts` makes of it; `status` is what it says instead."""

    parts: Callable[[list[Part]], list[Part]] = list
    status: grpc.StatusCode | None = None
    hangs: threading.Event | None = None
    calls: int = 0
    saves: OfferedSaves = field(default_factory=lambda: OfferedSaves(size_bytes=1024**3))

    def StreamSave(self, request: worker_pb2.StreamSaveRequest, context: Any) -> Iterator[Part]:
        self.calls += 1
        if self.status is not None:
            context.abort(self.status, "so it is")
        if self.hangs is not None:
            self.hangs.wait(20)
        offer = self.saves.find(request.manifest_digest)
        yield from self.parts([Part(manifest=offer.manifest), *(Part(content=part) for part in offer.parts())])


@dataclass
class Pods:
    """A worker that has saved an adapter, and a sampler with the same root."""

    trainer: Trainer
    target: str
    root: CheckpointRoot
    saved: SavedWeights
    now: float = 1000.0

    @property
    def reference(self) -> worker_pb2.AdapterRef:
        written = self.saved.written
        source = worker_pb2.SaveSource(target=self.target, worker_id="w", size_bytes=written.size_bytes)
        return worker_pb2.AdapterRef(
            directory=written.directory, manifest_digest=written.manifest_digest, source=source
        )

    def streams(self, base: BaseModelInfo = BASE) -> StreamedSaves:
        return StreamedSaves(lambda source: grpc.insecure_channel(source.target), base, lambda: self.now)

    def failure(self, streams: StreamedSaves | None = None) -> str:
        with pytest.raises(StreamFailed) as failed:
            (streams or self.streams()).take(self.reference)
        return failed.value.reason


@pytest.fixture(autouse=True)
def time_for_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_saves, "FIRST_PART_SECONDS", 60.0)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    draw = np.random.default_rng(1)
    tensors = {f"weights/{index}.lora_A": draw.random((4, 700_000), np.float32) for index in range(2)}
    state, root, trainer = (
        AdapterState(LoraSpec(4, 32.0, 7), 3, tensors),
        CheckpointRoot(f"file://{tmp_path}"),
        Trainer(),
    )
    saved = SavedWeights(root.write("s:train:0", 4, 1, "sampler", state, BASE, "ephemeral"), state)
    trainer.saves.add(saved)
    server = grpc.server(ThreadPoolExecutor(4))
    worker_pb2_grpc.add_WorkerServicer_to_server(trainer, server)
    with tempfile.TemporaryDirectory() as folder:
        server.add_insecure_port(f"unix:{folder}/worker")
        server.start()
        yield Pods(trainer, f"unix:{folder}/worker", root, saved)
        server.stop(None).wait()


def bits(state: AdapterState) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in state.tensors.items()}


def test_a_streamed_save_equals_the_root_bit_for_bit(pods: Pods) -> None:
    taken = pods.streams().take(pods.reference)
    read = pods.root.read(pods.saved.written.directory, pods.saved.written.manifest_digest, BASE).state
    assert (taken.lora, taken.optimizer_step, bits(taken)) == (read.lora, read.optimizer_step, bits(read))


def without_first(parts: list[Part]) -> list[Part]:
    return parts[1:]


def without_last(parts: list[Part]) -> list[Part]:
    return parts[:-1]


def with_one_more(parts: list[Part]) -> list[Part]:
    return [*parts, Part(content=b"more")]


def with_a_bit_changed(parts: list[Part]) -> list[Part]:
    content = parts[-1].content
    return [*parts[:-1], Part(content=content[:-1] + bytes([content[-1] ^ 1]))]


def with_another_manifest(parts: list[Part]) -> list[Part]:
    return [Part(manifest=parts[0].manifest + b" "), *parts[1:]]


def nothing(parts: list[Part]) -> list[Part]:
    return []


@pytest.mark.parametrize(
    "changed", [without_first, without_last, with_one_more, with_a_bit_changed, with_another_manifest, nothing]
)
def test_a_stream_with_wrong_digests_is_refused(pods: Pods, changed: Callable[[list[Part]], list[Part]]) -> None:
    pods.trainer.parts = changed
    assert pods.failure() == "damaged"


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (grpc.StatusCode.NOT_FOUND, "not_kept"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy"),
        (grpc.StatusCode.PERMISSION_DENIED, "refused"),
        (grpc.StatusCode.UNIMPLEMENTED, "refused"),
        (grpc.StatusCode.INTERNAL, "failed"),
    ],
)
def test_a_worker_that_does_not_give_it_is_a_reason(pods: Pods, status: grpc.StatusCode, reason: str) -> None:
    pods.trainer.status = status
    assert pods.failure() == reason


def test_a_worker_that_is_silent_is_not_waited_for_longer_than_the_root_would_take(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed_saves, "FIRST_PART_SECONDS", 0.2)
    pods.trainer.hangs = threading.Event()
    assert pods.failure() == "slow"
    pods.trainer.hangs.set()


def test_the_time_limit_grows_with_the_announced_size_and_a_wrong_size_does_not_shorten_it() -> None:
    assert patience(0) == patience(-5) == streamed_saves.FIRST_PART_SECONDS
    assert patience(370_000_000) == pytest.approx(streamed_saves.FIRST_PART_SECONDS + 3.7)


def test_a_worker_that_could_not_be_reached_is_left_alone_for_a_while(pods: Pods) -> None:
    streams, pods.trainer.status = pods.streams(), grpc.StatusCode.UNAVAILABLE
    assert [pods.failure(streams), pods.failure(streams)] == ["unreachable", "unreachable"]
    assert pods.trainer.calls == 1
    pods.trainer.status = None
    pods.now += AVOIDED_SECONDS
    assert streams.take(pods.reference).optimizer_step == 3


def test_a_worker_that_does_not_have_it_may_have_the_next_one(pods: Pods) -> None:
    streams, pods.trainer.status = pods.streams(), grpc.StatusCode.NOT_FOUND
    assert pods.failure(streams) == "not_kept"
    pods.trainer.status = None
    assert streams.take(pods.reference).optimizer_step == 3


def refuses(source: worker_pb2.SaveSource) -> grpc.Channel:
    raise ServerError(f"{source.target} is on a network, and there is no certificate to show there.")


def test_a_failed_stream_is_counted_by_its_reason_and_the_root_is_read(pods: Pods) -> None:
    sources = WeightSources(pods.root, BASE, streams=pods.streams())
    streamed = sources.fetch(pods.reference)
    pods.trainer.parts = with_a_bit_changed
    read = sources.fetch(pods.reference)
    assert bits(streamed) == bits(read)
    assert (sources.taken(), sources.streams_failed()) == ({"stream": 1, "root": 1}, {"damaged": 1})
    unconnected = WeightSources(pods.root, BASE, streams=StreamedSaves(refuses, BASE))
    unconnected.fetch(pods.reference)
    assert (unconnected.taken(), unconnected.streams_failed()) == ({"root": 1}, {"refused": 1})
