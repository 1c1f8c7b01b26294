"""Results that are sent to a client. Results are charged to the client's key, translated, and limited in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from tinsmith_server.errors import TooBusy
from tinsmith_server.services.accounts.admission import Admission
from tinsmith_server.services.accounts.sessions import Sessions
from tinsmith_server.services.polling.futures import Answer, Futures, Ready
from tinsmith_server.services.polling.long_polls import Pending
from tinsmith_server.services.training.operations import Operations
from tinsmith_server.wire.head import sampled_tokens
from tinsmith_server.wire.ids import is_sample, session_of
from tinsmith_server.wire.json_results import result_as_json

COMES_LATER = Pending("your other results are being sent; this one follows when they are finished")

# A small result does not wait for memory, because thousands of small results may be in progress.
SMALL_BYTES = 64 * 2**10
# The bytes of JSON and protobuf together, for each byte of the protobuf.
TIMES_IN_JSON = 7

Translate = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class LargeResult:
    """A result that uses memory of the budget. Close `room` when the result has been sent."""

    result: Ready
    room: ExitStack


class Results:
    """The answers of `retrieve_future`, in the form that is sent."""

    def __init__(self, futures: Futures, operations: Operations, sessions: Sessions, admission: Admission) -> None:
        self._futures = futures
        self._operations = operations
        self._sessions = sessions
        self._admission = admission

    async def fetch(
        self, tenant: str, request_id: str, key: str | None, *, in_json: bool, allow_metadata_only: bool = False
    ) -> Answer | LargeResult:
        """Hold the poll until the future has an answer, and return the answer.

        With `in_json`, a protobuf result is translated. Raises the errors of `Futures.retrieve`.
        """
        retrieve = partial(self._futures.retrieve, tenant, request_id, allow_metadata_only=allow_metadata_only)
        answer = await retrieve()
        if not isinstance(answer, Ready):
            return answer
        if is_sample(request_id):
            self._admission.charge_result(key, request_id, partial(sampled_tokens, answer.payload))
        translate = partial(result_as_json, of_sample=is_sample(request_id)) if in_json and answer.protobuf else None
        size = len(answer.payload)
        if size <= SMALL_BYTES:
            return await self._translated(tenant, answer, translate)
        with ExitStack() as room:
            account = room.enter_context(self._admission.results.account(tenant))
            taken = size if translate is None else TIMES_IN_JSON * size
            kept = answer if account.has_room(taken) else None
            del answer  # the result is dropped while it waits for memory
            try:
                await account.take(taken)
            except TooBusy:
                return COMES_LATER
            whole = kept or await retrieve()
            if not isinstance(whole, Ready):
                return whole
            return LargeResult(await self._translated(tenant, whole, translate), room.pop_all())

    async def delete_model(self, tenant: str, model_id: str) -> Answer:
        """End a model. If the session was created for this model, end the session, too.

        The answer is pending while operations of the model run.
        """
        ended = await self._operations.unload(tenant, model_id)
        answer = await self._futures.retrieve(tenant, str(ended), allow_metadata_only=False)
        if isinstance(answer, Ready):
            await self._sessions.finish_own(tenant, session_of(model_id))
        return answer

    async def _translated(self, tenant: str, answer: Ready, translate: Translate | None) -> Ready:
        if translate is None:
            return answer
        payload = answer.payload
        text = await self._admission.off_the_loop(tenant, len(payload), partial(translate, payload))
        return Ready(text, protobuf=False)
