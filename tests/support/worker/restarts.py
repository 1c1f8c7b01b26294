"""Operations of several models on one worker, over as many starts of its process as they take."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
from support.worker.process import Call, WorkerProcess, as_compared
from tinsmith_rpc import worker_pb2


@dataclass
class Lives:
    """The lives of a worker, driven as server and SDK do: acknowledged work is sent once, and results are polled."""

    worker: WorkerProcess
    ended: int = 0
    answers: dict[tuple[str, int], worker_pb2.AwaitReply] = field(default_factory=dict)

    async def run(self, calls: Sequence[Call]) -> None:
        """Submit all calls at once, and wait until each has an answer."""
        for call in calls:
            await self.across(lambda call=call: self.worker.submit(call))  # type: ignore[misc]
        for call in calls:
            await self.across(lambda call=call: self.ask(call))  # type: ignore[misc]

    async def run_beside(self, calls: Sequence[Call], others: Sequence[Call]) -> None:
        """Run `calls`, the others submitted while the first of them is under way and pending."""
        await self.across(lambda: self.worker.submit(calls[0]))
        while not (await self.worker.describe()).running_seconds:
            await asyncio.sleep(0)
        await self.run([*others, *calls])

    async def ask(self, call: Call) -> None:
        reply = await self.worker.result(call.seq_id, call.model_id)
        assert reply.WhichOneof("state") in ("result", "failure"), f"{call.model_id} {call.seq_id}: {reply}"
        self.answers[call.model_id, call.seq_id] = reply

    async def across(self, act: Callable[[], Awaitable[None]]) -> None:
        """Run this, restarting the worker whenever it has ended, until it succeeds."""
        while True:
            try:
                if self.worker.process is None:
                    await self.worker.start()
                await act()
            except grpc.aio.AioRpcError:
                self.ended += 1
                await self.worker.wait_dead()
                await self.worker.kill()
            else:
                return

    def results(self, model_id: str) -> dict[int, bytes]:
        """Return the results of this model's operations as bytes."""
        return {seq_id: as_compared(reply) for (model, seq_id), reply in self.answers.items() if model == model_id}

    def failure(self, seq_id: int, model_id: str) -> str:
        return self.answers[model_id, seq_id].failure.message

    async def saved_files(self, model_id: str) -> dict[str, bytes]:
        """Return the latest checkpoint of this model, without the manifest, which has its model's epoch."""
        saved = [event.checkpoint_saved for event in await self.worker.events() if event.HasField("checkpoint_saved")]
        [*_, last] = [event.directory for event in saved if event.model_id == model_id]
        folder = self.worker.folder / "checkpoints" / last
        return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
