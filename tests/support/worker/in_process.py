"""A worker's service in the test's own process, on the reference engine, with shorthands for a server's calls."""

from __future__ import annotations

from pathlib import Path

from support.engine.reference import ReferenceEngine
from support.worker.process import AWAIT_SECONDS, MODEL, Call, create
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.checkpoints.checkpoint_root import CheckpointRoot
from tinsmith_trainer.checkpoints.offered_saves import OfferedSaves
from tinsmith_trainer.checkpoints.shared_saves import SharedSaves
from tinsmith_trainer.engines.base import Engine
from tinsmith_trainer.oplog.journal_tables import OperationResult
from tinsmith_trainer.sampling.base import Sampler
from tinsmith_trainer.training.residency import ResidencyRules
from tinsmith_trainer.training.snapshotting import SnapshotPolicy
from tinsmith_trainer.worker.service import WorkerParts, WorkerService
from tinsmith_trainer.worker.volume import Volume


class Worker:
    """A service on the volume, and the checkpoints unless they are elsewhere, below a folder.

    On `engine`, or a reference engine of `slots`, `max_rank` and `seed`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        slots: int = 8,
        places: int | None = None,
        residency: ResidencyRules | None = None,
        max_rank: int = 16,
        reserved_bytes: int = 0,
        seed: int = 0,
        quantization: str = "",
        policy: SnapshotPolicy | None = None,
        journal_vfs: str | None = None,
        checkpoints: str | None = None,
        sampler: Sampler | None = None,
        engine: Engine | None = None,
        shared_saves: SharedSaves | None = None,
        offered_saves_bytes: int = 0,
    ) -> None:
        self.engine = engine or ReferenceEngine(
            adapter_slots=slots, max_rank=max_rank, seed=seed, quantization=quantization
        )
        parts = WorkerParts(
            engine=self.engine,
            sampler=sampler,
            checkpoints=CheckpointRoot(checkpoints or f"file://{folder / 'checkpoints'}"),
            volume=Volume(folder / "volume", reserved_bytes=reserved_bytes),
            policy=policy or SnapshotPolicy(),
            model_places=places,
            residency=residency or ResidencyRules(),
            journal_vfs=journal_vfs,
            shared_saves=shared_saves,
            offered_saves=OfferedSaves(size_bytes=offered_saves_bytes),
        )
        self.service = WorkerService(parts)

    async def submit(
        self, *calls: Call, rejection: str | None = None, tenant: str = "", share_weight: float = 1.0
    ) -> None:
        for call in calls:
            request = worker_pb2.SubmitRequest(
                epoch=self.service.epoch,
                model_id=call.model_id,
                seq_id=call.seq_id,
                kind=call.kind,
                payload=call.payload,
            )
            if rejection is not None:
                request.rejection.category, request.rejection.message = worker_pb2.USER, rejection
            await self.service.submit(request, tenant, share_weight)

    async def submit_without_number(self, call: Call, key: str) -> int:
        """Submit without a number, and return the assigned one."""
        request = worker_pb2.SubmitRequest(
            epoch=self.service.epoch,
            model_id=call.model_id,
            kind=call.kind,
            payload=call.payload,
            idempotency_key=key,
        )
        return await self.service.submit(request)

    async def finished(self, seq_id: int, model_id: str = MODEL) -> OperationResult:
        result = await self.service.wait_for(model_id, seq_id, AWAIT_SECONDS)
        assert result is not None, f"operation {seq_id} did not finish"
        return result

    async def recovered(self) -> None:
        """Wait until the engine has replayed the journal."""
        newcomer = create(model_id="sess:train:99")
        await self.submit(newcomer)
        await self.finished(0, newcomer.model_id)

    async def is_pending(self, seq_id: int, model_id: str = MODEL) -> bool:
        return await self.service.wait_for(model_id, seq_id, 0.05) is None

    async def failure(self, seq_id: int, model_id: str = MODEL) -> str:
        result = await self.finished(seq_id, model_id)
        assert result.failure is not None, f"operation {seq_id} worked"
        return f"{result.failure.category}: {result.failure.message}"

    async def events(self, after: int = 0) -> list[worker_pb2.Event]:
        return [worker_pb2.Event.FromString(body) for body in await self.service.events(after, 0)]
