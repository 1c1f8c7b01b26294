"""An adapter that ends every process that reads it is refused in the end, and no operation is blamed for it.

Each life of the worker is a real process, which its engine ends while the files are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from support.engine.deadly import FOLDER_VARIABLE, HANGS, HUNG, IMPORTING, SLOW_IMPORT
from support.worker.process import MODEL, WorkerProcess, create, step, train
from support.worker.restarts import Lives
from tinsmith_rpc import worker_pb2

ENGINE = "--engine=support.engine.deadly:build_deadly"
NO_ADAPTER = "is not PEFT's configuration for LoRA"
"""A reader's message about the files that these tests upload."""


@pytest.fixture
def deadly(tmp_path: Path) -> Path:
    """Return a folder: the engine dies at what a file in it names."""
    folder = tmp_path / "deadly"
    folder.mkdir()
    return folder


@asynccontextmanager
async def worker(folder: Path, attempts: int, deadly: Path) -> AsyncIterator[Lives]:
    flags = (ENGINE, f"--attempts-per-operation={attempts}", "--snapshot-replay-seconds=1000")
    process = WorkerProcess(folder, flags, {FOLDER_VARIABLE: str(deadly)})
    upload = folder / "checkpoints" / "upload"
    upload.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (upload / name).write_bytes(b"none")
    try:
        await process.start()
        yield Lives(process)
    finally:
        await process.kill()


async def bring_in(lives: Lives, run: str = "run") -> str:
    """Import, and return the refusal; empty where the process has ended of it."""
    request = worker_pb2.ImportAdapterRequest(
        directory="upload", model_id=run, lora=worker_pb2.LoraConfig(rank=4, train_attn=True)
    )
    try:
        await lives.worker.rpc.ImportAdapter(request)
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.INVALID_ARGUMENT:
            return error.details() or ""
        await lives.worker.wait_dead()
        await lives.worker.kill()
        await lives.worker.start()
        return ""
    raise AssertionError("it is no adapter")


async def appears(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.01)


async def test_an_import_is_refused_permanently_after_three_deaths_and_others_are_read(
    deadly: Path, tmp_path: Path
) -> None:
    async with worker(tmp_path, 3, deadly) as lives:
        (deadly / "import").touch()
        assert [await bring_in(lives) for _ in range(3)] == [""] * 3
        refusal = await bring_in(lives)
        assert refusal == (
            "The adapter of run was given up: the worker's process ended 3 times (the last sign: none, "
            "as when the system kills a process for lack of memory) while its files were read. Upload "
            "one of a lower rank or of fewer modules, or have the worker's memory increased."
        )
        (deadly / "import").unlink()
        assert await bring_in(lives) == refusal
        assert NO_ADAPTER in await bring_in(lives, "another")


async def test_an_operation_during_a_deadly_import_is_not_blamed_and_succeeds(deadly: Path, tmp_path: Path) -> None:
    """At a limit of one death each."""
    async with worker(tmp_path, 1, deadly) as lives:
        await lives.run([create(), train(1), step(2)])
        for file in (SLOW_IMPORT, HANGS, "import"):
            (deadly / file).touch()
        reading = asyncio.ensure_future(bring_in(lives))
        await appears(deadly / IMPORTING)
        await lives.worker.submit(train(3))
        await appears(deadly / HUNG)
        (deadly / SLOW_IMPORT).unlink()
        assert await reading == ""
        (deadly / HANGS).unlink()
        await lives.run([step(4)])
        await lives.ask(train(3))
        assert [lives.failure(seq_id, MODEL) for seq_id in (3, 4)] == ["", ""]
        assert await bring_in(lives) == "", "it was not known to be its own end, so it is tried once more, alone"
        assert "was given up: the worker's process ended once" in await bring_in(lives)
        await lives.run([train(5), step(6)])
        assert (lives.failure(6, MODEL), lives.ended) == ("", 0)


async def test_an_import_is_not_blamed_for_a_concurrent_operation(deadly: Path, tmp_path: Path) -> None:
    async with worker(tmp_path, 1, deadly) as lives:
        await lives.run([create()])
        for file in (SLOW_IMPORT, HANGS):
            (deadly / file).touch()
        reading = asyncio.ensure_future(bring_in(lives))
        await appears(deadly / IMPORTING)
        await lives.worker.submit(train(1))
        await appears(deadly / HUNG)
        process = lives.worker.process
        assert process is not None
        process.kill()
        (deadly / HANGS).unlink()
        (deadly / SLOW_IMPORT).unlink()
        assert await reading == ""
        assert NO_ADAPTER in await bring_in(lives)
        await lives.run([step(2)])
        assert lives.failure(2, MODEL) == ""
