"""A worker's usage counts by tenant, and its timelines of operations."""

from __future__ import annotations

import time
from pathlib import Path

import apsw
import numpy as np
from support.sampler.scripted_sampler import ScriptedSampler
from support.worker.in_process import Worker
from support.worker.process import MODEL, broken_train, create, save, train
from tinsmith_rpc import worker_pb2
from tinsmith_trainer.process.usage_meter import HOUR_SECONDS
from tinsmith_trainer.worker.accounting import read_timeline

from .conftest import StartWorker

SESSION = MODEL.split(":")[0]
# Of `train`: each token is given those before it.
TOKENS = 4


def taken(worker: Worker) -> dict[tuple[str, str, int], int]:
    """Return the usage by tenant, purpose and kind."""
    reply = worker.service.accounting.meter.take()
    assert all(one.hour % HOUR_SECONDS == 0 and abs(time.time() - one.hour) < 2 * HOUR_SECONDS for one in reply.usage)
    return {(one.used_by, one.tenant, one.kind): one.amount for one in reply.usage}


async def timeline(worker: Worker, session_id: str) -> list[worker_pb2.Span]:
    service = worker.service
    return list((await service.accounting.timeline(session_id, service.queues.all(), service.samples)).spans)


TRAINED = (MODEL, "alice", worker_pb2.TRAINING_TOKENS)


async def test_a_replay_counts_no_usage_and_a_clean_stop_keeps_usage_that_was_not_collected(start: StartWorker) -> None:
    worker = await start()
    await worker.submit(create(), train(1), tenant="alice")
    await worker.finished(1)
    successor = await start()
    await successor.recovered()
    assert taken(successor) == {TRAINED: TOKENS}
    assert taken(await start()) == {}


async def test_a_timeline_has_the_operations_of_its_session_alone_in_order(worker: Worker) -> None:
    await worker.submit(create(), train(1), train(2, forward_only=True), save(3, "a"), broken_train(4))
    await worker.submit(create(model_id="other:train:0"))
    await worker.finished(4)
    assert (await timeline(worker, "unknown")) == []
    spans = await timeline(worker, SESSION)
    assert [(span.owner, span.seq_id, span.name, span.failed) for span in spans] == [
        (MODEL, 0, "create_model", False),
        (MODEL, 1, "forward_backward", False),
        (MODEL, 2, "forward", False),
        (MODEL, 3, "save_weights", False),
        (MODEL, 4, "forward_backward", True),
    ]
    assert all(0 < span.submitted <= span.started <= span.ended for span in spans)


async def test_a_timeline_reads_no_body_and_no_result(worker: Worker) -> None:
    """They are in front of the times, and may be gigabytes together; whatever is submitted meanwhile would wait."""

    def plan(db: apsw.Connection) -> str:
        seen: list[str] = []
        db.exec_trace = lambda _, sql, bindings: seen.append(sql) or True  # type: ignore[func-returns-value]
        read_timeline(db, SESSION)
        db.exec_trace = None
        return str(db.execute(f"EXPLAIN QUERY PLAN {seen[0]}", (SESSION, SESSION, 1)).fetchall())

    assert "COVERING INDEX timeline" in worker.service.journal.read(plan).result()


async def test_the_usage_of_a_sample_has_its_prompt_and_its_tokens_and_the_timeline_has_the_sample(
    tmp_path: Path,
) -> None:
    worker = Worker(tmp_path, sampler=ScriptedSampler())
    await worker.service.activate(1)
    samples = worker.service.samples
    assert samples is not None
    request = worker_pb2.SampleRequest(
        request_id="a", sampling_session_id=f"{SESSION}:sample:0", prompt_tokens=np.arange(3, dtype="<i4").tobytes()
    )
    samples.submit(request, "alice")
    await samples.wait("a", timeout_seconds=20)
    assert taken(worker) == {
        (f"{SESSION}:sample:0", "alice", worker_pb2.PREFILLED_TOKENS): 2,
        (f"{SESSION}:sample:0", "alice", worker_pb2.CACHED_PREFILL_TOKENS): 1,
        (f"{SESSION}:sample:0", "alice", worker_pb2.SAMPLED_TOKENS): 1,
    }
    [span] = await timeline(worker, SESSION)
    assert (span.name, span.request_id, span.failed) == ("sample", "a", False)
    assert await timeline(worker, "other") == []
    await worker.service.drain()
