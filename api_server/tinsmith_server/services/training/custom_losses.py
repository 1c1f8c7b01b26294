"""Custom losses, which are checked here so that their author gets an error at once, and are stored nowhere.

A loss's id contains the loss (`tinsmith_rpc.custom_losses`), and each call that uses the loss sends the id. So every
replica and every worker has the loss, also in a replay. A repeated submission has the same id. The worker checks the
content of an id again, because anyone can write an id.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic import ValidationError
from tinsmith_rpc.custom_losses import CustomLossInvalid, loss_id_of

from tinsmith_server.errors import Unprocessable
from tinsmith_server.services.accounts.sessions import Sessions
from tinsmith_server.wire.ids import CustomLossId
from tinsmith_server.wire.json_bodies import sentence
from tinsmith_server.wire.requests import Count, Request


class CreateCustomLossRequest(Request):
    """The request of a custom loss. `tinsmith_rpc.custom_losses` reads its content, as the worker does."""

    session_id: str
    custom_loss_seq_id: Count
    name: str
    inputs: list[Any]
    graph: dict[str, Any]


class CustomLosses:
    """The custom losses of sessions. A future belongs to a session; the loss itself is in its id."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def create(self, tenant: str, loss: CustomLossId) -> CustomLossId:
        """Return the loss's id. Raises NotFound and Gone for another tenant's or a finished session."""
        await self._sessions.active(tenant, loss.session_id)
        return loss

    async def owned(self, tenant: str, loss: CustomLossId) -> None:
        """Check the loss's session. Raises NotFound, also for another tenant's session."""
        await self._sessions.owned(tenant, loss.session_id)

    async def result(self, tenant: str, loss: CustomLossId) -> bytes:
        """Return the future's result, which is always the same, at any server. Raises the errors of `owned`."""
        await self.owned(tenant, loss)
        return orjson.dumps({"loss_id": loss.loss_id, "type": "create_custom_loss"})


def custom_loss_id(body: dict[str, Any]) -> CustomLossId:
    """Return the id of a `create_custom_loss`.

    Raises Unprocessable, because a refusal blocks no later calls, unlike the refusal of a chunk.
    """
    try:
        request = CreateCustomLossRequest.model_validate(body)
        loss_id = loss_id_of({"name": request.name, "inputs": request.inputs, "graph": request.graph})
    except ValidationError as error:
        raise Unprocessable(sentence(error)) from error
    except CustomLossInvalid as error:
        raise Unprocessable(str(error)) from error
    return CustomLossId(request.session_id, loss_id)
