"""The lookup of a checkpoint by its `tinker://` path, for readers who have access."""

from __future__ import annotations

from tinsmith_server.errors import AuthenticationFailed, TinsmithError, WorkerError
from tinsmith_server.services.accounts.keys import Keys
from tinsmith_server.services.checkpoints.worker_events import Events
from tinsmith_server.store.records import Checkpoint, CheckpointType, Clock, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.ids import parse_tinker_path

MADE_BY = {"training": "save_state", "sampler": "save_weights_for_sampler", "external": "save_weights_external"}


class CheckpointRefused(TinsmithError):
    """The checkpoint does not exist for this reader, or is of the wrong kind."""


class CheckpointLookup:
    """An object that finds the tenant's own checkpoints and public checkpoints.

    For a checkpoint that is not in the store yet, the lookup asks the worker.
    """

    def __init__(self, store: Store, events: Events, keys: Keys, clock: Clock = utc_now) -> None:
        self._store = store
        self._keys = keys
        self._events = events
        self._clock = clock

    async def readable(
        self, tenant: str, path: str, required_type: CheckpointType | None = None, access_token: str | None = None
    ) -> Checkpoint:
        """Return the checkpoint.

        Raises CheckpointRefused; another tenant's private checkpoint looks like a missing checkpoint.

        An external checkpoint contains weights, so it is accepted wherever weights are required. `access_token` may be
        a key or a token of another tenant. With `access_token`, the other tenant's checkpoints can be read, too.
        """
        try:
            parsed = parse_tinker_path(path)
        except ValueError as error:
            raise CheckpointRefused(str(error)) from error
        if required_type is not None and parsed.type not in (required_type, "external"):
            raise CheckpointRefused(
                f"{path} is a {parsed.type} checkpoint; this needs one made by {MADE_BY[required_type]}"
            )
        checkpoint = await self._find(parsed.run_id, parsed.type, parsed.name)
        readers = {tenant} if access_token is None else {tenant, await self._tenant_of(access_token)}
        if checkpoint is None or not (checkpoint.public or checkpoint.tenant in readers):
            raise CheckpointRefused(f"there is no checkpoint {path}")
        return checkpoint

    async def _tenant_of(self, access_token: str) -> str:
        try:
            return await self._keys.authenticate(access_token)
        except AuthenticationFailed as error:
            raise CheckpointRefused(f"weights_access_token: {error}") from error

    async def _find(self, run_id: str, type: CheckpointType, name: str) -> Checkpoint | None:
        found = await self.live(run_id, type, name)
        if found is not None:
            return found
        run = await self._store.get_model(run_id)
        if run is None or not run.worker_id:
            return None
        try:
            # Do not wait for an absent worker. A client learns of a save only after the save's record is in the store.
            await self._events.drain(run.worker_id, connect_seconds=0)
        except WorkerError:
            return None
        return await self.live(run_id, type, name)

    async def live(self, run_id: str, type: CheckpointType, name: str) -> Checkpoint | None:
        """Return the record, or None if the checkpoint has expired and will be removed."""
        checkpoint = await self._store.get_checkpoint(run_id, type, name)
        if checkpoint is None or (checkpoint.expires_at is not None and checkpoint.expires_at <= self._clock()):
            return None
        return checkpoint
