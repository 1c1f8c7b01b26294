"""The promises of a store. `tests/contract/store` holds them against SQLite and PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Protocol

from tinsmith_server.store.records import (
    Along,
    ApiKey,
    AuditEntry,
    Checkpoint,
    CheckpointType,
    FinalState,
    FinishType,
    Kept,
    Line,
    Model,
    ModelState,
    Page,
    PromotedPath,
    Promotion,
    PromotionBounds,
    SamplingSession,
    Session,
    StoredCheckpoints,
    Usage,
    Worker,
)

Choice = Callable[[Line], Mapping[str, str]]
"""Of a line: which models get a place now, and at which worker. It only decides: a transaction waits for it."""


class Store(Protocol):
    """All methods are one transaction each, safe from several replicas and tasks at once.

    Any of them raises `StoreUnavailable` when the database does not answer, and `UnstorableValue` for
    text, numbers or times that no row can hold (`store/errors.py`).
    """

    # ---- keys and tenants
    async def add_key(self, tenant: str, name: str, prefix: str, key_hash: str, now: datetime) -> ApiKey:
        """Inserts, or returns the key that has this hash already, revoked or not."""

    async def add_first_key(self, tenant: str, name: str, prefix: str, key_hash: str, now: datetime) -> ApiKey | None:
        """Inserts unless there is any key already; of replicas that start at once, one gets its own."""

    async def find_key(self, key_hash: str) -> ApiKey | None:
        """The key with this hash, unless revoked."""

    async def list_keys(self, tenant: str | None = None) -> Sequence[ApiKey]: ...
    async def revoke_key(self, key_id: int, now: datetime) -> bool:
        """False when there is no such key; revoking twice is True."""

    # ---- sessions
    async def create_session(self, session: Session, idempotency_key: str | None) -> Session:
        """Inserts, or returns the session that this tenant made with the same idempotency key."""

    async def session_of_key(self, tenant: str, idempotency_key: str) -> Session | None: ...
    async def get_session(self, session_id: str) -> Session | None: ...
    async def list_sessions(self, tenant: str, limit: int, offset: int) -> Page[Session]: ...
    async def sessions_behind(
        self, tenant: str, position: tuple[datetime, str] | None, limit: int
    ) -> Sequence[Session]:
        """Newest first, those that come after the one with this time of creation and id; None: from the newest on."""

    async def assign_project(self, tenant: str, session_id: str, project_id: str) -> bool:
        """False when the tenant has no such session."""

    async def heartbeat(self, session_id: str, now: datetime) -> Session | None:
        """Notes a sign of life unless the session is finished; returns the session as it is then."""

    async def finish_session(self, session_id: str, type: FinishType, detail: str | None, now: datetime) -> bool:
        """First finish wins: False when it was finished before or does not exist."""

    async def finish_silent_session(
        self, session_id: str, type: FinishType, detail: str | None, now: datetime, last_heartbeat_before: datetime
    ) -> bool:
        """Like `finish_session`, but False as well when the last sign of life is not older."""

    async def silent_sessions(self, last_heartbeat_before: datetime) -> Sequence[Session]:
        """Unfinished sessions whose last sign of life is older."""

    async def finished_sessions_with_live_models(self) -> Sequence[Session]:
        """Finished sessions that still have a model accepted or bound: their release must be repeated."""

    async def forget_sessions_without_models(self, prefix: str, finished_before: datetime) -> int:
        """Removes finished sessions whose ids begin so, with their idempotency keys and sampling sessions.

        Those that never had a model, of whatever state, a few hundred in a transaction. Returns how many.
        """

    # ---- models
    async def add_model(self, model: Model) -> Model:
        """Inserts, or returns the model already made under the same (session_id, model_seq_id)."""

    async def get_model(self, model_id: str) -> Model | None: ...
    async def bind_model(self, model_id: str, worker_id: str) -> bool:
        """Notes that the worker has the model. False when the model is not its, or not any more."""

    async def end_model(
        self, model_id: str, state: FinalState, failure: str | None = None, *, only_unplaced: bool = False
    ) -> bool:
        """Frees the model's slot in the same transaction. The first end is final: later ones change nothing.

        With `only_unplaced` a model that has been given a place meanwhile lives on. False when nothing changed.
        """

    async def touch_model(self, model_id: str, now: datetime) -> None: ...
    async def list_models(self, tenant: str, limit: int, offset: int, project_id: str | None = None) -> Page[Model]:
        """Newest first, without those whose creation failed: nothing was ever trained there.

        Models with `tinsmith-purpose` in their user_metadata are left out, too: a command made them for a moment.
        With `project_id` only those of sessions in this project.
        """

    async def live_models_of_session(self, session_id: str) -> Sequence[Model]: ...
    async def model_ids_of_session(self, session_id: str) -> Sequence[str]:
        """Without those whose creation failed, of which there may be any number."""

    async def models_of_worker(self, worker_id: str, states: Sequence[ModelState]) -> Sequence[Model]: ...
    async def count_live_models(self, tenant: str) -> int:
        """Those accepted or bound."""

    async def accepted_models(self) -> Sequence[Model]:
        """Those that no worker has yet, oldest first."""

    async def unbound_models(self, tenant: str, limit: int) -> Sequence[Model]:
        """The tenant's models that no worker has yet, oldest first."""

    # ---- places at workers
    async def line(self, base_models: Collection[str], worker_ids: Collection[str]) -> Line:
        """The models of these base models that wait for a place, and who holds the places of these workers."""

    async def give_places(
        self, base_models: Collection[str], slots: Mapping[str, int], choose: Choice
    ) -> Mapping[str, str]:
        """Gives models of the line the places that `choose` gives them; `slots` says how many a worker has.

        One at a time for each worker, whichever replica calls: `choose` sees the line as it is, and what it gives
        holds. What another caller has in hand at that moment, or what would be one too many, is left out. Returns
        who got a place, and at which worker.
        """

    async def bind_where_made(self, model_id: str, worker_id: str, slots: int) -> bool:
        """Binds an accepted model to the worker that has made it, wherever it was placed meanwhile.

        It is at home there even if its slot has been given away since. False when it is bound elsewhere, has
        ended, or is not known: a bound model never moves, so that of several workers that made it one has it.
        """

    async def displace_model(self, model_id: str, worker_id: str) -> None:
        """Takes an accepted model away from the worker that refused it. A bound one stays."""

    async def used_slots(self) -> Mapping[str, int]:
        """By worker; those without any are missing."""

    # ---- workers
    async def epoch_of(self, worker_id: str) -> int:
        """The epoch alone, which every acknowledgement asks for; 0 for a worker that was never seen."""

    async def get_worker(self, worker_id: str) -> Worker:
        """Makes the row at first sight: epoch 0, no instance, cursor 0."""

    async def raise_epoch(self, worker_id: str, expected_epoch: int, instance_id: str) -> Worker | None:
        """Compare-and-swap to expected_epoch + 1; None when another replica was faster."""

    async def advance_cursor(self, worker_id: str, event_id: int) -> None:
        """Never moves backwards."""

    async def note_home(self, worker_id: str, home: str) -> None: ...
    async def workers_with_live_models(self) -> Sequence[Worker]:
        """Those at which an accepted or bound model is placed."""

    # ---- sampling sessions
    async def add_sampling_session(self, session: SamplingSession) -> SamplingSession:
        """Inserts, or returns the one already opened under (session_id, sampling_session_seq_id)."""

    async def get_sampling_session(self, sampling_session_id: str) -> SamplingSession | None: ...
    async def number_sampling_client(self, sampling_session_id: str) -> int:
        """1, 2, … of a sampling session that is there."""

    async def sampler_ids_of_session(self, session_id: str) -> Sequence[str]: ...
    async def newest_inflight(self, model_id: str) -> SamplingSession | None: ...

    # ---- checkpoints
    async def put_checkpoint(self, checkpoint: Checkpoint, along: Along = ()) -> Checkpoint | None:
        """Points the name at a new directory unless the present or deleted one is as new or newer
        by (epoch, event_id). Returns the record that it replaced, whose files are garbage now; None
        where nothing was replaced, or both point to the same directory. The new directory is garbage no more."""

    async def get_checkpoint(self, run_id: str, type: CheckpointType, name: str) -> Checkpoint | None: ...
    async def checkpoints_of_run(self, run_id: str) -> Sequence[Checkpoint]:
        """Newest first, without ephemeral ones."""

    async def list_checkpoints(
        self, tenant: str, limit: int, offset: int, types: Collection[CheckpointType] | None = None
    ) -> Page[Checkpoint]:
        """Newest first, without ephemeral ones; those of these types alone, where some are given."""

    async def kept_of_sessions(self, session_ids: Collection[str]) -> Mapping[str, Kept]:
        """Named checkpoints of each session's models; sessions without any are missing."""

    async def checkpoint_bytes(self, tenant: str) -> int:
        """Of all that it has, without ephemeral ones."""

    async def delete_checkpoint(
        self,
        run_id: str,
        type: CheckpointType,
        name: str,
        now: datetime,
        along: Along = (),
        unless_promoted: PromotedPath | None = None,
    ) -> Checkpoint | None:
        """Leaves a tombstone, so that a replayed event does not bring it back. Returns what it was, and None where
        nothing is deleted: there is none, or a name stands for it."""

    async def delete_expired_checkpoint(
        self, run_id: str, type: CheckpointType, name: str, now: datetime
    ) -> Checkpoint | None:
        """The same, but only if its time is over at `now`: whoever looked earlier may have seen another one."""

    async def set_checkpoint_public(
        self, run_id: str, type: CheckpointType, name: str, public: bool, along: Along = ()
    ) -> None: ...
    async def set_checkpoint_expiry(
        self,
        run_id: str,
        type: CheckpointType,
        name: str,
        expires_at: datetime | None,
        along: Along = (),
        unless_promoted: PromotedPath | None = None,
    ) -> bool:
        """False where nothing is changed: there is none, or a name stands for it."""

    async def expired_checkpoints(self, now: datetime) -> Sequence[Checkpoint]:
        """Those with `expires_at` at or before `now`, of every type."""

    async def ephemeral_checkpoints(self, tenant: str) -> Sequence[Checkpoint]:
        """Oldest first."""

    async def ephemeral_of_finished_sessions(self, finished_before: datetime) -> Sequence[Checkpoint]: ...
    async def forget_deleted_checkpoints(self, deleted_before: datetime) -> None:
        """Removes the tombstones of models that have ended, as far as their worker's events have been heard.

        The sampling sessions that unnamed saves had opened go with them: a run leaves one with each of its steps.
        """

    # ---- names that stand for saved samplers
    async def add_promotion(
        self,
        promotion: Promotion,
        previous: Promotion | None,
        checkpoint: Checkpoint,
        most: PromotionBounds,
        along: Along = (),
    ) -> bool:
        """False where the one that counts is not `previous`, the checkpoint that it is to stand for is gone or has an
        end, or a new name would be one too many: then nothing is changed."""

    async def promotion(self, tenant: str, name: str) -> Promotion | None:
        """The one that counts."""

    async def promotions_of(self, tenant: str, name: str) -> Sequence[Promotion]:
        """Newest first."""

    async def list_promotions(self, tenant: str) -> Sequence[Promotion]:
        """The one that counts of each name, by name."""

    async def names_promoted_to(self, tenant: str, tinker_path: str) -> Sequence[str]:
        """Those that stand for it now."""

    async def remove_promotions(self, tenant: str, name: str, along: Along = ()) -> bool:
        """All of a name. False where there is none."""

    # ---- files that no name points to any more
    async def list_garbage(self, now: datetime) -> Sequence[str]:
        """Directories without a record, and reserved ones whose time is over."""

    async def reserve_directory(self, directory: str, until: datetime) -> None:
        """Notes a directory that is about to be written, or one that will be within it. The record that names it ends
        the reservation. From `until` on the directory is garbage, unless a record names it or one within it."""

    async def remove_garbage(self, directory: str) -> None: ...

    # ---- who used what, and who did what
    async def add_usage(self, rows: Collection[Usage]) -> None:
        """Adds to what is there, of any replica. No two of `rows` have the same key."""

    async def add_storage_usage(self, now: datetime, least: timedelta, longest: timedelta) -> None:
        """Adds what checkpoints with a name take now, for the time since the last round: not before that is `least`,
        and for `longest` at most."""

    async def usage_between(self, tenant: str, start: datetime, end: datetime, most: int) -> Sequence[Usage]:
        """Of hours from `start` until before `end`, in their order, the largest amounts of each first."""

    async def sessions_named(self, tenant: str, session_ids: Collection[str]) -> Sequence[Session]:
        """Those of them that are the tenant's. Some hundred ids at most."""

    async def stored_checkpoints(
        self, tenant: str, now: datetime, project_id: str | None = None
    ) -> Sequence[StoredCheckpoints]:
        """By project, the largest first; with `project_id` of this one alone."""

    async def list_audit(
        self, tenant: str, start: datetime, end: datetime, after: AuditEntry | None, limit: int
    ) -> Sequence[AuditEntry]:
        """Oldest first, from `start` until before `end`, those behind `after`."""

    async def forget_accounts(self, before: datetime) -> None:
        """Removes usage and audit entries that are older."""

    # ---- replicas and their shares of the work; the database's clock says when their time is over
    async def now(self) -> datetime:
        """The time by the database's clock."""

    async def attend(self, replica: str, seconds: float) -> Sequence[str]:
        """Says that the replica is there for so long; returns all that are, in order."""

    async def attending(self) -> Sequence[str]:
        """All replicas that are there, in order."""

    async def hold_leases(self, replica: str, names: Collection[str], seconds: float) -> frozenset[str]:
        """Takes those that are free, expired or its own, from now for `seconds`; returns which it got."""

    async def give_up_leases(self, replica: str, names: Collection[str]) -> None:
        """Those of `names` that are its own are free."""

    async def leave(self, replica: str) -> None:
        """All that it holds is free, and nobody counts on it."""

    async def forget_the_gone(self) -> None:
        """Removes replicas and leases whose time was over an hour ago."""

    async def note_round(self, name: str, now: datetime, absence: timedelta) -> datetime:
        """A round is made at `now`, by any replica. Returns since when rounds of this name have come
        without a gap longer than `absence`."""

    # ---- the installation
    async def secret(self, name: str) -> bytes:
        """32 random bytes, drawn once per name and the same for every replica."""

    async def counts(self) -> Mapping[str, int]:
        """Rows by state for metrics: `models.<state>`, `sessions.active`, `checkpoints.<type>`."""

    async def check(self) -> None:
        """Returns when the database has answered; does not wait for one that is down to come back."""

    async def close(self) -> None: ...
