"""The events of optimizer steps, from which a server keeps the series of a run.

The transaction of a call's result adds the call's sums to a row, and the transaction of the next optim_step turns the
row into an event. So a step is reported once, with all gradients that it used, after any crash: a replay writes no
result.
"""

from __future__ import annotations

import math

from tinsmith_rpc import worker_pb2

from tinsmith_trainer.oplog.journal_tables import Database, Operation, OperationResult


def note_gradient(db: Database, operation: Operation, result: OperationResult) -> None:
    """Add the sums of a call that has added to the model's gradients."""
    sums = result.gradient
    if sums is None:
        return
    db.execute(
        "INSERT INTO gradients VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (model_id) DO UPDATE SET"
        " tokens = tokens + excluded.tokens, seconds = seconds + excluded.seconds, loss = loss + excluded.loss,"
        " loss_terms = loss_terms + excluded.loss_terms, gap = gap + excluded.gap,"
        " gap_tokens = gap_tokens + excluded.gap_tokens",
        (
            operation.model_id,
            sums.tokens,
            result.seconds,
            _storable(sums.loss),
            sums.loss_terms,
            _storable(sums.gap),
            sums.gap_tokens,
        ),
    )


def take_step(db: Database, operation: Operation, result: OperationResult) -> worker_pb2.Event | None:
    """Remove the model's sums if the operation has used or dropped its gradients. Return the event of a step.

    An optim_step uses the gradients, or drops them if it fails. A load drops them.
    """
    drops = operation.kind == worker_pb2.OPTIM_STEP or (
        operation.kind == worker_pb2.LOAD_WEIGHTS and result.failure is None
    )
    if not drops:
        return None
    sums = db.execute(
        "DELETE FROM gradients WHERE model_id = ? RETURNING tokens, seconds, loss, loss_terms, gap, gap_tokens",
        (operation.model_id,),
    ).fetchone()
    if result.step is None:
        return None
    tokens, seconds, loss, loss_terms, gap, gap_tokens = sums or (0, 0.0, 0.0, 0, 0.0, 0)
    done = worker_pb2.StepDone(
        model_id=operation.model_id,
        position=operation.seq_id,
        step=result.step.step,
        tokens=tokens,
        loss=_mean(loss, loss_terms),
        grad_norm=result.step.grad_norm,
        learning_rate=result.step.learning_rate,
        seconds=seconds + result.seconds,
        sampler_gap=_mean(gap, gap_tokens),
    )
    return worker_pb2.Event(step_done=done)


def _storable(total: float) -> float:
    """Return the total, or infinity if it is not finite. SQLite stores NaN as NULL, and inf - inf would be NaN."""
    return total if math.isfinite(total) else math.inf


def _mean(total: float, count: int) -> float:
    return total / count if count and math.isfinite(total) else math.nan
