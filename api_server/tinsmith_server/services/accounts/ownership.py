"""Whose something is: every tenant sees what is its own, and of the rest not even that it is there.

Apart from the sessions and the models since rooms below these ask it, too.
"""

from __future__ import annotations

from tinsmith_server.errors import NotFound
from tinsmith_server.logs import bind_ids
from tinsmith_server.store.records import Model, Session
from tinsmith_server.store.store import Store


async def owned_session(store: Store, tenant: str, session_id: str) -> Session:
    """Raises NotFound, also for another tenant's session."""
    session = await store.get_session(session_id)
    if session is None or session.tenant != tenant:
        raise NotFound(f"there is no session {session_id}")
    bind_ids(session_id=session_id)
    return session


async def owned_model(store: Store, tenant: str, model_id: str) -> Model:
    """Raises NotFound, also for another tenant's model."""
    model = await store.get_model(model_id)
    if model is None or model.tenant != tenant:
        raise NotFound(f"there is no model {model_id}")
    bind_ids(session_id=model.session_id, model_id=model_id)
    return model
