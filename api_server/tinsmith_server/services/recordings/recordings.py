"""Recordings of agents. An agent's requests are extended from recorded tokens, and each answer is stored as a turn."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import orjson
from tinsmith_rpc import worker_pb2

from tinsmith_server.errors import NotFound, Unprocessable
from tinsmith_server.services.accounts.body_budget import BodyBudget
from tinsmith_server.services.polling.texts import Generation, Texts
from tinsmith_server.services.recordings.histories import Conversation, History, Place, Reason, own_digests
from tinsmith_server.services.recordings.sequences import sequences_of
from tinsmith_server.store.records import Clock, Page, RecordedTurn, Recording, utc_now
from tinsmith_server.store.store import Store
from tinsmith_server.wire.dialects.openai import STAGES
from tinsmith_server.wire.dialects.texts import Message, Prompt, TextRequest
from tinsmith_server.wire.plain_requests import CreateRecordingRequest
from tinsmith_server.wire.responses import RecordedSequence

RECORDINGS_PER_TENANT = 4096
OBSTACLES: Mapping[worker_pb2.ExtensionObstacle.ValueType, Reason] = {
    worker_pb2.REASONING_REMOVED: "reasoning_removed",
    worker_pb2.HISTORY_REWRITTEN: "history_rewritten",
    worker_pb2.ANSWER_NOT_CLOSED: "answer_not_closed",
}


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt of a recorded request: its place, and its tokens after the tokens of the place."""

    place: Place
    tokens_before: bytes
    tokens: bytes
    end_tokens: tuple[int, ...] = ()
    conversation: Conversation | None = None

    def whole(self) -> Prompt:
        return Prompt(tokens=self.tokens_before + self.tokens, end_tokens=self.end_tokens)


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request of an agent. `request` has the tokens of the prompts."""

    recording: Recording
    request: TextRequest
    prompts: tuple[RecordedPrompt, ...]
    started_at: datetime


class OpenTurns:
    """The turns of a recording in memory. The owner of this object must close it."""

    def __init__(self, memory: BodyBudget, recording: Recording) -> None:
        self.turns: Sequence[RecordedTurn] = ()
        self._recording = recording
        self._room = ExitStack()
        self._account = self._room.enter_context(memory.account(recording.tenant))

    async def load(self, store: Store) -> None:
        """Wait for room in memory, and read the turns. Raises TooBusy."""
        await self._account.take(self._recording.size_bytes)
        self._account.received()
        self.turns = await store.recorded_turns(self._recording.recording_id)

    def sequences(self) -> Iterator[RecordedSequence]:
        """Yield the sequences one by one, because sequences with a common beginning need more memory than the turns."""
        return sequences_of(self.turns)

    def close(self) -> None:
        self.turns = ()
        self._room.close()


class Recordings:
    """The recordings of tenants. All state is in the store, so any server can answer the next turn."""

    def __init__(
        self, store: Store, texts: Texts, memory: BodyBudget, bytes_per_tenant: int, clock: Clock = utc_now
    ) -> None:
        """Create the service. `memory` limits the turns that are in memory at the same time."""
        self._store = store
        self._texts = texts
        self._memory = memory
        self._bytes_per_tenant = bytes_per_tenant
        self._clock = clock

    async def create(self, tenant: str, request: CreateRecordingRequest) -> Recording:
        """Open a recording. Raises NotFound for a model that the tenant cannot sample, and Unprocessable at a limit."""
        await self._texts.model(tenant, request.model)
        await self._check_bytes(tenant)
        now = self._clock()
        recording = Recording(
            recording_id=f"rec-{uuid.uuid4().hex}",
            tenant=tenant,
            model=request.model,
            created_at=now,
            expires_at=now + timedelta(seconds=request.ttl_seconds),
            most_turns=request.max_turns,
            most_bytes=request.max_bytes,
        )
        if not await self._store.add_recording(recording, RECORDINGS_PER_TENANT):
            raise Unprocessable(f"you have {RECORDINGS_PER_TENANT} recordings, which is the limit: delete some first")
        return recording

    async def get(self, tenant: str, recording_id: str) -> Recording:
        """Return the recording. Raises NotFound for an unknown, expired or foreign recording."""
        found = await self._store.recording(tenant, recording_id)
        if found is None or found.expires_at <= self._clock():
            raise NotFound(
                f"you have no recording {recording_id[:80]!r}: it was deleted, has expired, or never existed; create "
                "another one with POST /api/v1/recordings"
            )
        return found

    async def list(self, tenant: str, limit: int, offset: int) -> Page[Recording]:
        return await self._store.list_recordings(tenant, limit, offset)

    async def read(self, recording: Recording) -> OpenTurns:
        """Return the turns of the recording. Raises TooBusy while the tenant's memory is used up."""
        opened = OpenTurns(self._memory, recording)
        try:
            await opened.load(self._store)
        except BaseException:
            opened.close()
            raise
        return opened

    async def delete(self, tenant: str, recording_id: str) -> None:
        """Delete the recording with its turns. Raises NotFound."""
        await self.get(tenant, recording_id)
        await self._store.delete_recording(tenant, recording_id)

    async def prepare(self, tenant: str, recording_id: str, request: TextRequest) -> RecordedRequest:
        """Return the request with the tokens of its prompts.

        Raises NotFound, Unprocessable for a full recording, TooBusy, and the errors of `Texts.render`.
        """
        recording, now = await self.get(tenant, recording_id), self._clock()
        if any(prompt.images for prompt in request.prompts):
            raise Unprocessable("a recording has only tokens; send a conversation with images to /v1 instead")
        self._check_room(recording, len(request.prompts) * request.choices)
        await self._check_bytes(tenant)
        opened = await self.read(recording)
        try:
            history = History(opened.turns)
            prompts = tuple([await self._placed(recording, history, prompt) for prompt in request.prompts])
        finally:
            opened.close()
        size = recording.size_bytes + sum(len(prompt.tokens) for prompt in prompts) * request.choices
        if size > recording.most_bytes:
            raise Unprocessable(_full(recording, f"{recording.most_bytes} bytes", "max_bytes"))
        whole = tuple(prompt.whole() for prompt in prompts)
        sent = replace(request, model=recording.model, prompts=whole, is_recorded=True)
        return RecordedRequest(recording, sent, prompts, now)

    async def record(
        self, asked: RecordedRequest, generations: Sequence[Generation], answers: Sequence[Message]
    ) -> None:
        """Store the answers as turns. Raises NotFound if the recording was deleted in the meantime."""
        turns = [
            self._turn(asked, number, choice, generation, answers[number * asked.request.choices + choice])
            for number, generation in enumerate(generations)
            for choice in range(len(generation.drawn))
            if generation.drawn[choice].tokens
        ]
        if turns and not await self._store.add_recorded_turns(asked.recording.recording_id, turns):
            raise NotFound(f"the recording {asked.recording.recording_id} was deleted during this request")

    async def _placed(self, recording: Recording, history: History, prompt: Prompt) -> RecordedPrompt:
        rendered = prompt.rendered
        if rendered is None:
            place = history.place_of_tokens(prompt.tokens)
            before = history.tokens(place.parent)
            return RecordedPrompt(place, before, prompt.tokens[len(before) :])
        if rendered.WhichOneof("prompt") == "text":
            text = await self._texts.render(recording.tenant, recording.model, rendered)
            return RecordedPrompt(Place(None, "completion"), b"", text.tokens, tuple(text.end_tokens))
        messages = orjson.loads(rendered.conversation)
        asked = Conversation.of(messages, rendered.tools, rendered.variables)
        place = history.place(asked)
        before = history.tokens(place.parent)
        reply = await self._texts.render(recording.tenant, recording.model, _extending(rendered, history, place, asked))
        if reply.obstacle in OBSTACLES:
            place, before = Place(None, OBSTACLES[reply.obstacle]), b""
        return RecordedPrompt(place, before, reply.tokens, tuple(reply.end_tokens), asked)

    def _turn(
        self, asked: RecordedRequest, number: int, choice: int, generation: Generation, answer: Message
    ) -> RecordedTurn:
        prompt, drawn = asked.prompts[number], generation.drawn[choice]
        digests = b""
        if prompt.conversation is not None:
            digests = own_digests(prompt.conversation.digests_with(_as_message(answer)), prompt.place)
        return RecordedTurn(
            recording_id=asked.recording.recording_id,
            number=0,
            parent=prompt.place.parent,
            reason=prompt.place.reason if choice == 0 else "repeated",
            model_path=generation.weights.path,
            weights_digest=generation.weights.digest,
            finish_reason=_finish(answer),
            sampling=_sampling(asked.request, answer),
            started_at=asked.started_at,
            ended_at=self._clock(),
            settings_digest=prompt.conversation.settings if prompt.conversation is not None else b"",
            message_digests=digests,
            reasoning=answer.reasoning.encode(),
            prompt_tokens=prompt.tokens,
            sampled_tokens=drawn.tokens,
            logprobs=drawn.logprobs,
        )

    def _check_room(self, recording: Recording, turns: int) -> None:
        if recording.turns + turns > recording.most_turns:
            raise Unprocessable(_full(recording, f"{recording.most_turns} turns", "max_turns"))

    async def _check_bytes(self, tenant: str) -> None:
        if await self._store.recorded_bytes(tenant) >= self._bytes_per_tenant:
            raise Unprocessable(
                f"your recordings have {self._bytes_per_tenant} bytes, which is the limit "
                "(recording_bytes_per_tenant): delete recordings whose datums you have"
            )


def _extending(
    rendered: worker_pb2.RenderPromptRequest, history: History, place: Place, asked: Conversation
) -> worker_pb2.RenderPromptRequest:
    """Return the request for the tokens after the recorded tokens of the place."""
    if place.parent is None:
        return rendered
    extending = worker_pb2.RenderPromptRequest()
    extending.CopyFrom(rendered)
    extending.conversation = orjson.dumps(history.with_reasoning(place, asked.messages)).decode()
    extending.recorded.messages = place.covered
    extending.recorded.last_token = int.from_bytes(history.tokens(place.parent)[-4:], "little", signed=True)
    return extending


def _sampling(request: TextRequest, answer: Message) -> Mapping[str, Any]:
    """Return what decides the distribution from which the answer was drawn, and the stage of the logprobs."""
    changes = {
        "frequency_penalty": request.frequency_penalty,
        "presence_penalty": request.presence_penalty,
        "logit_bias": {str(token): bias for token, bias in request.logit_bias.items()},
        "constrained": request.constraint is not None,
        "logprob_stage": STAGES.get(answer.logprob_stage),
    }
    params = request.params.model_dump(mode="json", exclude_none=True)
    return {**params, "stop": list(request.stops)} | {name: value for name, value in changes.items() if value}


def _as_message(answer: Message) -> Mapping[str, Any]:
    """Return the answer as the client will send it back."""
    calls = [{"function": {"name": call.name, "arguments": _arguments(call.arguments)}} for call in answer.calls]
    return {"role": "assistant", "content": answer.content, "tool_calls": calls}


def _arguments(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def _finish(answer: Message) -> str:
    if answer.ran_to_its_length:
        return "length"
    return "tool_calls" if answer.calls else "stop"


def _full(recording: Recording, limit: str, field: str) -> str:
    return (
        f"the recording {recording.recording_id} has reached its limit of {limit}: read its sequences, and create "
        f"another one, or one with a larger {field}"
    )
