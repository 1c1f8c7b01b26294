"""Each way in which a worker refuses to start: its status, its last line, and its termination log."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from support.engine.gated import SEED_VARIABLE
from support.worker.pod_worker import IMAGE, PodWorker, finished
from support.worker.process import create, train
from tinsmith_trainer.torch_model.tiny_model import TinyShape, make_tiny_model

StartPod = Callable[..., PodWorker]
CANNOT_START, USAGE, CRASHED = 3, 2, 1


@pytest.fixture
async def pod(tmp_path: Path) -> AsyncIterator[StartPod]:
    pods: list[PodWorker] = []

    def start(**options: object) -> PodWorker:
        pod = PodWorker(tmp_path, **options)  # type: ignore[arg-type]
        pods.append(pod)
        return pod

    yield start
    for pod in pods:
        await pod.discard()


async def refusal(worker: PodWorker, status: int = CANNOT_START) -> dict[str, str]:
    """Return the termination log of a worker that must not start, whose sentence is the last line of its errors."""
    worker.start()
    code, errors = await worker.ended()
    assert code == status, errors
    record = worker.termination()
    assert errors.splitlines()[-1] == f"tinsmith-trainer: {record['message']}"
    return record


async def crashed_after_one_operation(worker: PodWorker) -> None:
    worker.start()
    stub = await worker.activated()
    await worker.submit(stub, create(), train(1))
    await finished(stub, 1)
    worker.signal(signal.SIGKILL)
    await worker.ended()


async def test_operations_that_ran_with_other_numbers_are_not_replayed(pod: StartPod) -> None:
    await crashed_after_one_operation(pod())
    record = await refusal(pod(flags={"--dtype": "bfloat16"}))
    assert "--dtype was auto and is bfloat16" in record["message"]
    again = pod(epoch=2)
    again.start()
    await finished(await again.activated(), 1)


async def test_a_model_that_is_not_there(pod: StartPod) -> None:
    record = await refusal(pod(flags={"--engine": "peft", "--model": "/models/nowhere"}))
    assert record == {
        "reason": "ModelNotFound",
        "message": "The model directory /models/nowhere does not exist. Put the model's files there.",
    }


async def test_a_model_with_a_forward_that_raises(pod: StartPod, tmp_path: Path) -> None:
    """Its files are sound and its shapes are not: three key heads do not go into four."""
    model = make_tiny_model(tmp_path / "model", shape=TinyShape(kv_heads=3))
    record = await refusal(pod(flags={"--engine": "peft", "--model": str(model)}))
    assert record["reason"] == "ModelCannotLoad"
    assert f"The engine peft cannot load {model}: RuntimeError: The size of tensor" in record["message"]


async def test_a_model_for_which_there_is_no_memory_may_fit_at_the_next_start(pod: StartPod) -> None:
    """The process that uses the memory now may end: the worker is started again, as after a crash."""
    record = await refusal(pod(flags={"--engine": "support.engine.wrong:finds_no_memory"}), CRASHED)
    assert record["reason"] == "OutOfMemory"
    assert "CUDA out of memory. Tried to allocate 2.00 GiB" in record["message"]


async def test_other_weights_than_the_journals(pod: StartPod) -> None:
    await crashed_after_one_operation(pod())
    record = await refusal(pod(environment={SEED_VARIABLE: "1"}))
    assert record["reason"] == "ModelChanged"
    assert "Put the old files back" in record["message"]


async def test_a_volume_that_cannot_be_written(pod: StartPod, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record = await refusal(pod(flags={"--volume": str(tmp_path / "file" / "worker")}))
    assert record["reason"] == "VolumeUnsuitable"


async def test_another_image_before_a_clean_stop(pod: StartPod) -> None:
    await crashed_after_one_operation(pod())
    record = await refusal(pod(flags={"--image": "tinsmith/trainer@sha256:two"}))
    assert (record["reason"], record["image"]) == ("ImageChanged", IMAGE)
    assert IMAGE in record["message"]
    assert "tinsmith/trainer@sha256:two" in record["message"]


async def test_an_unexpected_error(pod: StartPod) -> None:
    worker = pod(flags={"--engine": "support.engine.wrong:finds_a_broken_device"})
    worker.start()
    code, errors = await worker.ended()
    assert code == CRASHED
    assert "Traceback" in errors
    assert "tinsmith-trainer: CUDA error: an illegal memory access was encountered" in errors.splitlines()
    assert worker.termination() == {
        "reason": "CannotStart",
        "message": "CUDA error: an illegal memory access was encountered",
    }
