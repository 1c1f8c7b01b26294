"""The search among a tenant's own checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinsmith_server.errors import NotFound
from tinsmith_server.services.accounts.tokens import tenant_urn
from tinsmith_server.services.checkpoints.checkpoints import Types
from tinsmith_server.store.records import Checkpoint, CheckpointFilter, CheckpointPosition, Clock
from tinsmith_server.store.store import Store
from tinsmith_server.wire.search import CheckpointSearchRequest, UserOwner

LOOKED_THROUGH = 1000
"""The number of checkpoints that one request reads. The next request continues after the last one that was read."""
AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class CheckpointPage:
    """A page of found checkpoints. `behind` is the position of the next page, or None if this is the last page."""

    found: Sequence[Checkpoint]
    behind: CheckpointPosition | None


class CheckpointSearch:
    """The search among a tenant's own checkpoints, newest first."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def search(self, tenant: str, request: CheckpointSearchRequest, types: Types) -> CheckpointPage:
        """Return a page of checkpoints of the types that the client knows. Raises NotFound for an unknown project."""
        await self._check_projects(tenant, request.project_ids)
        if isinstance(request.owner, UserOwner) and tenant_urn(tenant) not in request.owner.owner_urns:
            return CheckpointPage((), None)
        asked = types if request.checkpoint_type is None else types & {request.checkpoint_type}
        return await self._matching(CheckpointFilter(tenant, asked, request.base_models, request.project_ids), request)

    async def _check_projects(self, tenant: str, project_ids: Sequence[str] | None) -> None:
        if not project_ids:
            return
        known = await self._store.projects_among(tenant, project_ids)
        if unknown := sorted(set(project_ids) - set(known)):
            raise NotFound(f"there is no project {unknown[0]!r}: no session of yours is assigned to it")

    async def _matching(self, wanted: CheckpointFilter, request: CheckpointSearchRequest) -> CheckpointPage:
        cursor = request.cursor
        behind = (
            None if cursor is None else CheckpointPosition.parse(cursor.last_created_at, cursor.last_checkpoint_uuid)
        )
        found: list[Checkpoint] = []
        now = self._clock()
        for _ in range(LOOKED_THROUGH // AT_ONCE):
            rows = await self._store.checkpoints_after(wanted, behind, AT_ONCE)
            for checkpoint in rows:
                behind = CheckpointPosition.of(checkpoint)
                is_kept = checkpoint.expires_at is None or checkpoint.expires_at > now
                if is_kept and _has(checkpoint, request.user_metadata):
                    found.append(checkpoint)
                    if len(found) == request.limit:
                        return CheckpointPage(found, behind)
            if len(rows) < AT_ONCE:
                return CheckpointPage(found, None)
        return CheckpointPage(found, behind)


def _has(checkpoint: Checkpoint, metadata: dict[str, str]) -> bool:
    known = checkpoint.user_metadata or {}
    return all(known.get(key) == value for key, value in metadata.items())
