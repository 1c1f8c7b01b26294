"""Custom losses. Custom losses are checked here, so that an author gets an error immediately, and are stored nowhere.

The ID of a loss contains the whole loss (`tinsmith_rpc.custom_losses`), and each call that uses the loss sends the ID.
So every replica and every worker has the loss, even in a replay. A repeated submission has the same id. The worker
checks the content of an ID again, because anyone can write such an ID.
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
    """The request of a custom loss. Server and worker both read the content with `tinsmith_rpc.custom_losses`."""

    session_id: str
    custom_loss_seq_id: Count
    name: str
    inputs: list[Any]
    graph: dict[str, Any]


class CustomLosses:
    """The custom losses of sessions.

    The future of a custom loss belongs to a session, and the future's ID contains the loss.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def create(self, tenant: str, loss: CustomLossId) -> CustomLossId:
        """Return the ID of the loss. Raises NotFound for another tenant's session, and Gone for a finished session."""
        await self._sessions.active(tenant, loss.session_id)
        return loss

    async def owned(self, tenant: str, loss: CustomLossId) -> None:
        """Check that the session of `loss` belongs to the tenant.

        Raises NotFound for an unknown session, and for another tenant's session.
        """
        await self._sessions.owned(tenant, loss.session_id)

    async def result(self, tenant: str, loss: CustomLossId) -> bytes:
        """Return the result of the future.

        The result is always the same, at every server. Raises the errors of `owned`.
        """
        await self.owned(tenant, loss)
        return orjson.dumps({"loss_id": loss.loss_id, "type": "create_custom_loss"})


def custom_loss_id(body: dict[str, Any]) -> CustomLossId:
    """Return the ID of the loss in a `create_custom_loss` request.

    Raises Unprocessable. Unlike the refusal of a chunk of training data, this refusal blocks no later calls.
    """
    try:
        request = CreateCustomLossRequest.model_validate(body)
        loss_id = loss_id_of({"name": request.name, "inputs": request.inputs, "graph": request.graph})
    except ValidationError as error:
        raise Unprocessable(sentence(error)) from error
    except CustomLossInvalid as error:
        raise Unprocessable(str(error)) from error
    return CustomLossId(request.session_id, loss_id)
