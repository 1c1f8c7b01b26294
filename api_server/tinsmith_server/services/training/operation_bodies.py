"""The operation in the body of a training call. The tokens of the operation are charged to the rate of the key."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import partial

from tinsmith_rpc import worker_pb2
from tinsmith_rpc.zstd_frames import FrameInvalid, declared_bytes, unpack, unpacked_bytes

from tinsmith_server.errors import BodyTooLarge, Unprocessable
from tinsmith_server.services.accounts.admission import INLINE_BYTES, Admission
from tinsmith_server.services.accounts.body_budget import Account
from tinsmith_server.services.failures import rejection
from tinsmith_server.services.training.submit_requests import CallKey, JsonOperation, json_operation
from tinsmith_server.settings import Settings
from tinsmith_server.wire.head import Head, HeadUnreadable, read_head, trained_tokens
from tinsmith_server.wire.ids import operation_number
from tinsmith_server.wire.json_bodies import BadJson, read_object
from tinsmith_server.wire.json_training import training_shape

# The bytes of the arrays for each byte of the JSON text.
TEXT_IN_MEMORY = 2

STABLE_REINFORCE_NOTE = (
    "stable_reinforce has no public formula; this server runs it as cispo with the same inputs, and a penalty by "
    "kl_coeff of its own (setting map_stable_reinforce)"
)


@dataclass(frozen=True, slots=True)
class TrainingBody:
    """A received body.

    If the body is over the limit, `complete` is False and `content` is only the beginning of the body.
    """

    content: bytes
    encoding: str
    complete: bool
    too_large: str
    """The message of the rejection if the body is over the limit."""


@dataclass(frozen=True, slots=True)
class TrainingOperation:
    """The operation without the epoch. `note` is a text for the user."""

    request: worker_pb2.SubmitRequest
    note: str | None


class OperationBodies:
    """A reader of training bodies. An invalid body becomes a rejected operation that has no content."""

    def __init__(self, admission: Admission, settings: Settings) -> None:
        self._admission = admission
        self._limit = settings.max_body_bytes
        self._maps_stable_reinforce = settings.map_stable_reinforce

    async def from_protobuf(self, body: TrainingBody, account: Account, key: str | None) -> TrainingOperation:
        """Return the operation. The operation contains the SDK's message unchanged.

        Raises Unprocessable only if model_id or seq_id cannot be read.
        """
        head = await self._head(account.tenant, body)
        operation = worker_pb2.SubmitRequest(
            model_id=head.model_id, seq_id=operation_number(head.seq_id), kind=worker_pb2.FORWARD_BACKWARD
        )
        if not body.complete:
            operation.rejection.CopyFrom(rejection(body.too_large))
        elif body.encoding == "identity":
            operation.payload = body.content
        else:
            keep = self._keep_gzip if body.encoding == "gzip" else self._keep_zstd
            try:
                await keep(operation, body.content, account)
            except BodyTooLarge:
                operation.rejection.CopyFrom(rejection(body.too_large))
            except FrameInvalid as error:
                operation.rejection.CopyFrom(rejection(f"the {body.encoding} body is damaged: {error}"))
            account.received()
        return await self._charged(operation, head.loss_fn, account, key)

    async def from_json(self, content: bytes, call: CallKey, account: Account, key: str | None) -> TrainingOperation:
        """Return the operation in the form in which the current SDK would send it. Raises Unprocessable."""
        # Numbers of a few digits take more memory than their text.
        room = min(TEXT_IN_MEMORY * len(content), self._limit)
        await account.take(room)
        account.received()

        def operation() -> JsonOperation:
            return json_operation(read_object(content, training_shape(self._limit)), call, self._limit)

        try:
            read = await self._admission.off_the_loop(account.tenant, len(content), operation)
        except BadJson as error:
            raise Unprocessable(str(error)) from error
        account.give_back(room - min(room, len(read.request.payload)))
        return await self._charged(read.request, read.loss_fn, account, key)

    async def _charged(
        self, operation: worker_pb2.SubmitRequest, loss_fn: str | None, account: Account, key: str | None
    ) -> TrainingOperation:
        """Wait until the key is below its rate, and charge the tokens to the key."""
        note = STABLE_REINFORCE_NOTE if loss_fn == "stable_reinforce" and self._maps_stable_reinforce else None
        if not self._admission.rates.trained.limits or operation.HasField("rejection"):
            return TrainingOperation(operation, note)
        await self._admission.wait_to_train(key)
        unpacked = declared_bytes(operation.payload) if operation.zstd else None
        size, count = max(unpacked or 0, len(operation.payload)), partial(trained_tokens, operation.payload, unpacked)
        # One body is counted at a time. So its unpacked content needs no further budget, and bodies need not wait for
        # that.
        overdrawn = account.overdrawn(unpacked or 0)
        tokens = await self._admission.off_the_loop(account.tenant, size, count, overdrawn)
        self._admission.charge_trained(key, tokens)
        return TrainingOperation(operation, note)

    async def _head(self, tenant: str, body: TrainingBody) -> Head:
        """Return the head of a body. Raises Unprocessable. A compressed body is read in a thread."""
        size = len(body.content) if body.encoding == "identity" else INLINE_BYTES + 1
        try:
            return await self._admission.off_the_loop(tenant, size, lambda: read_head(body.content, body.encoding))
        except HeadUnreadable as error:
            raise Unprocessable(str(error)) from error

    async def _keep_zstd(self, operation: worker_pb2.SubmitRequest, frame: bytes, account: Account) -> None:
        """Keep the zstd frame unchanged if the frame declares its size.

        Unpack a frame that declares no size, because a worker does not know the size limit. Raises BodyTooLarge,
        FrameInvalid.
        """
        declared = declared_bytes(frame)
        size = declared
        if size is None:
            measure = partial(unpacked_bytes, frame, self._limit)
            size = await self._admission.off_the_loop(account.tenant, self._limit, measure)
        if size > self._limit:
            raise BodyTooLarge(f"a body of {size} bytes or more")
        if declared is not None:
            operation.payload, operation.zstd = frame, True
        else:
            await account.take(size)
            operation.payload = await self._admission.off_the_loop(account.tenant, size, partial(unpack, frame, size))

    async def _keep_gzip(self, operation: worker_pb2.SubmitRequest, content: bytes, account: Account) -> None:
        """Unpack the content, because workers can read only zstd. Raises BodyTooLarge, FrameInvalid."""
        await account.take(self._limit)
        unpacked = partial(gunzipped, content, self._limit)
        operation.payload = await self._admission.off_the_loop(account.tenant, self._limit, unpacked)
        account.give_back(self._limit - len(operation.payload))


def gunzipped(content: bytes, limit: int) -> bytes:
    decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        unpacked = decompressor.decompress(content, limit + 1)
    except zlib.error as error:
        raise FrameInvalid(str(error)) from error
    if len(unpacked) > limit:
        raise BodyTooLarge(f"a body of {len(unpacked)} bytes or more")
    if not decompressor.eof:
        raise FrameInvalid("the data end before the checksum")
    if decompressor.unused_data:
        raise FrameInvalid("there are more data after the end")
    return unpacked
