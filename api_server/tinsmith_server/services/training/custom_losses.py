"""Custom losses: read and checked here, so that who makes one hears at once what is wrong with it, and kept nowhere.

A loss's id holds all of it (`tinsmith_rpc.custom_losses`), and comes back with each call that names it. So it is known
to every replica and every worker, in a replay, too, and a repeated submission has the same id. What an id holds is
checked again by the worker, since anybody can write one.
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
    """What it is made of is read by `tinsmith_rpc.custom_losses`, as the worker reads it."""

    session_id: str
    custom_loss_seq_id: Count
    name: str
    inputs: list[Any]
    graph: dict[str, Any]


class CustomLosses:
    """Losses belong to a session as far as their futures go; a loss itself is nobody's secret but its sender's."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def create(self, tenant: str, loss: CustomLossId) -> CustomLossId:
        """Raises NotFound and Gone for a session that is none of the tenant's, or over."""
        await self._sessions.active(tenant, loss.session_id)
        return loss

    async def owned(self, tenant: str, loss: CustomLossId) -> None:
        """Raises NotFound, also for a loss of another tenant's session."""
        await self._sessions.owned(tenant, loss.session_id)

    async def result(self, tenant: str, loss: CustomLossId) -> bytes:
        """What the future comes to, at any server and at any time. Raises NotFound, as `owned` does."""
        await self.owned(tenant, loss)
        return orjson.dumps({"loss_id": loss.loss_id, "type": "create_custom_loss"})


def custom_loss_id(body: dict[str, Any]) -> CustomLossId:
    """Of a `create_custom_loss`. Raises Unprocessable: unlike a chunk of a call, it holds up nothing."""
    try:
        request = CreateCustomLossRequest.model_validate(body)
        loss_id = loss_id_of({"name": request.name, "inputs": request.inputs, "graph": request.graph})
    except ValidationError as error:
        raise Unprocessable(sentence(error)) from error
    except CustomLossInvalid as error:
        raise Unprocessable(str(error)) from error
    return CustomLossId(request.session_id, loss_id)
