"""A worker without an engine: the real gRPC service over memory, for tests of the HTTP side.

It assumes what `worker.proto` promises and no more: a submit is accepted once per (model_id,
seq_id) whatever its body, an operation is done as soon as it was accepted unless a test withholds
it, a rejection is a failed result, and saves are reported as events before their result is there. What comes without a
number gets its model's next one, the same for the same key.
It neither orders operations nor computes anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import time
import uuid
from array import array
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import grpc
from tinsmith_rpc import (
    CUSTOM_LOSS,
    PLAIN_SEQ_IDS,
    RELEASE_SEQ_ID,
    SHARE_WEIGHT_METADATA,
    TENANT_METADATA,
    wire_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from tinsmith_trainer.sampling.ended_samples import EndedSamples, SampleClient
from typing_extensions import override

Key: TypeAlias = tuple[str, int]
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

LORA = worker_pb2.LoraConfig(rank=8, alpha=32, train_attn=True, train_mlp=True, train_unembed=True)
SAVED_BYTES = 11
SAVED_FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
END_TOKEN = 7
DRAWN, DRAWN_LOGPROBS = (301, 302), (-0.5, -1.25, -0.125)
"""The tokens of a recorded answer before its end, and the logprobs of all."""


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    """A worker whose attributes tests read and change."""

    text_breaks = 0
    """The number of calls for a text that end with their connection."""
    metrics = worker_pb2.WorkerMetrics()
    obstacle = worker_pb2.NO_OBSTACLE
    """The reason why recorded tokens cannot be extended."""
    reasoning = ""
    tool_call: worker_pb2.ToolCall | None = None
    """The call of each answer, as `reasoning` is its reasoning."""
    running_seconds = 0.0
    share_weight: float = 1.0  # of the last submit

    def __init__(self, adapter_slots: int = 0) -> None:
        self.adapter_slots = adapter_slots
        self.checkpoints: Path | None = None  # the root; without one a save leaves a record alone
        self.saved_files: dict[str, bytes] = dict(SAVED_FILES)
        self.model_places = 0
        self.quantization = self.stored_as = self.numerics = ""
        self.losses = ["cross_entropy", CUSTOM_LOSS]
        self.instance_id = uuid.uuid4().hex
        self.epoch = 0
        self.submits: list[worker_pb2.SubmitRequest] = []
        self.tenants: list[str] = []  # of submits and samples
        self.operations: dict[Key, worker_pb2.SubmitRequest] = {}
        self.outcomes: dict[Key, worker_pb2.AwaitReply] = {}
        self.events: list[worker_pb2.Event] = []
        self.samples: dict[str, worker_pb2.SampleRequest] = {}
        self.prepared: list[worker_pb2.AdapterRef] = []
        self.streams_saves = False
        self.idle_seconds = 0.0
        self.ended = EndedSamples()
        self.cancelled: list[str] = []
        self.withheld: set[Key | str] = set()
        self.withholds_texts = False
        self.on_text: Callable[[], None] = lambda: None  # when one waits for more of it
        self.prompts: list[worker_pb2.RenderPromptRequest] = []
        self.prompt_refusal = ""
        self.tokenizer: dict[str, bytes] = {"tokenizer.json": b"{}", "config.json": b"{}"}
        self.tokenizer_refusal = ""
        self.tokenizers_sent = 0
        self.tokenizer_held: asyncio.Event | None = None
        self.disk_full = False
        self.sampler_full = False
        self.full_for: set[str] = set()  # tenants
        self.only_trains = False
        self.draining = False
        self.hangs = False
        self.tells_of_one_sample = False  # True: as a release before did
        self.many_requested = asyncio.Event()
        self.gives_numbers = True  # False: as the release before did
        self.assigned_numbers: dict[tuple[str, str], int] = {}  # by model and key
        self.drains = 0
        self.sample_calls = 0
        self.awaits = 0  # calls for results of operations
        self.samples_waiting = 0
        self.create_failure: str | None = None
        self.imports: list[worker_pb2.ImportAdapterRequest] = []
        self.import_failure: tuple[grpc.StatusCode, str] | None = None
        self.used: list[worker_pb2.Usage] = []  # given away once
        self.spans: list[worker_pb2.Span] = []
        self.before_ack: Callable[[], Awaitable[None]] | None = None
        self._changed = asyncio.Condition()
        self._awaiting = asyncio.Event()

    # ---- what tests do

    async def finish(self, key: Key | str) -> None:
        """Lets a withheld operation or sample have its result."""
        self.withheld.discard(key)
        if isinstance(key, str):
            self.ended.note(key)
        else:
            self._settle(self.operations[key])
        async with self._changed:
            self._changed.notify_all()

    async def awaited(self) -> None:
        """Wait until a call waits for a result that does not exist yet."""
        await self._awaiting.wait()

    def lose_memory(self) -> None:
        """Lose memory as in a crash: a new instance, without samples, on the same journal."""
        self.instance_id, self.epoch = uuid.uuid4().hex, 0
        self.samples.clear()
        self.ended = EndedSamples()

    def lose_volume(self) -> None:
        self.lose_memory()
        self.operations.clear()
        self.outcomes.clear()
        self.events.clear()

    def payload(self, model_id: str, seq_id: int) -> bytes:
        return self.operations[model_id, seq_id].payload

    # ---- the service

    @override
    async def Describe(self, request: worker_pb2.DescribeRequest, context: Context) -> worker_pb2.DescribeReply:
        if self.hangs:
            await asyncio.Event().wait()
        reply = worker_pb2.DescribeReply(instance_id=self.instance_id, epoch=self.epoch)
        reply.base_model.max_sequence_length = 512
        reply.base_model.quantization = self.quantization
        reply.base_model.stored_as = self.stored_as
        reply.capabilities.adapter_slots = self.adapter_slots
        reply.capabilities.numerics = self.numerics
        reply.capabilities.images = True
        reply.capabilities.losses.extend(self.losses)
        reply.model_places = self.model_places
        reply.streams_saves = self.streams_saves
        reply.idle_seconds = self.idle_seconds
        reply.running_seconds = self.running_seconds
        reply.metrics.samples_waiting = self.samples_waiting
        reply.metrics.MergeFrom(self.metrics)
        return reply

    @override
    async def Activate(self, request: worker_pb2.ActivateRequest, context: Context) -> worker_pb2.ActivateReply:
        if request.epoch < self.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a newer server was here")
        self.epoch = request.epoch
        return worker_pb2.ActivateReply(instance_id=self.instance_id)

    @override
    async def Submit(self, request: worker_pb2.SubmitRequest, context: Context) -> worker_pb2.SubmitReply:
        self.submits.append(request)
        self.tenants.append(_tenant_of(context))
        weight = dict(context.invocation_metadata() or ()).get(SHARE_WEIGHT_METADATA, "1")
        self.share_weight = float(weight)
        if request.epoch != self.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another epoch holds")
        if self.disk_full:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the journal's disk is full")
        if request.idempotency_key and self.gives_numbers:
            request.seq_id = self._number(request)
        key = (request.model_id, request.seq_id)
        creates = request.kind in {worker_pb2.CREATE_MODEL, worker_pb2.LOAD_MODEL}
        if not creates and (request.model_id, 0) not in self.operations:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this worker does not hold {request.model_id}")
        if key not in self.operations:
            self.operations[key] = request
            if key not in self.withheld:
                self._settle(request)
        if self.before_ack is not None:
            await self.before_ack()
        return worker_pb2.SubmitReply(epoch=request.epoch, seq_id=request.seq_id if self.gives_numbers else 0)

    def _number(self, request: worker_pb2.SubmitRequest) -> int:
        numbers = [number for model_id, number in self.operations if model_id == request.model_id]
        highest = max((number for number in numbers if PLAIN_SEQ_IDS < number < RELEASE_SEQ_ID), default=PLAIN_SEQ_IDS)
        return self.assigned_numbers.setdefault((request.model_id, request.idempotency_key), highest + 1)

    @override
    async def ImportAdapter(
        self, request: worker_pb2.ImportAdapterRequest, context: Context
    ) -> worker_pb2.ImportAdapterReply:
        self.imports.append(request)
        if self.import_failure is not None:
            await context.abort(*self.import_failure)
        directory = f"external_weights/{request.model_id.replace(':', '.')}/{len(self.imports)}"
        lora = worker_pb2.LoraConfig(rank=request.lora.rank, alpha=7, train_attn=True)
        return worker_pb2.ImportAdapterReply(
            directory=directory, manifest_digest=self._write(directory), size_bytes=SAVED_BYTES, lora=lora
        )

    @override
    async def Await(self, request: worker_pb2.AwaitRequest, context: Context) -> worker_pb2.AwaitReply:
        key = (request.model_id, request.seq_id)
        self.awaits += 1
        if key not in self.operations:
            return worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
        return await self._wait(lambda: self.outcomes.get(key), request.timeout_seconds)

    @override
    async def Sample(self, request: worker_pb2.SampleRequest, context: Context) -> worker_pb2.SampleReply:
        self.sample_calls += 1
        self.tenants.append(_tenant_of(context))
        if self.hangs:
            await asyncio.Event().wait()
        if self.only_trains:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this worker does not sample")
        if self.draining:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        if self.sampler_full or _tenant_of(context) in self.full_for:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many samples are waiting")
        if request.request_id not in self.samples and request.request_id not in self.withheld:
            self.ended.note(request.request_id)
        self.samples.setdefault(request.request_id, request)
        return worker_pb2.SampleReply()

    @override
    async def AwaitSample(self, request: worker_pb2.AwaitSampleRequest, context: Context) -> worker_pb2.AwaitReply:
        if request.request_id not in self.samples:
            return worker_pb2.AwaitReply(not_found=worker_pb2.NotFound())
        reply = await self._wait(lambda: self._sampled(request.request_id), request.timeout_seconds)
        if not reply.HasField("pending"):
            self.ended.forget(request.request_id)
        return reply

    @override
    async def AwaitSamples(
        self, request: worker_pb2.AwaitSamplesRequest, context: Context
    ) -> worker_pb2.AwaitSamplesReply:
        """Answer as the real worker does."""
        if self.tells_of_one_sample:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such call")
        client = SampleClient(request.sampling_session_id, request.client)
        lost = [one for one in request.expected if one not in self.samples]
        if request.timeout_seconds:
            self.many_requested.set()
        is_any = bool(lost) or await self.ended.any(client, request.seen, request.timeout_seconds)
        if not request.round:
            return worker_pb2.AwaitSamplesReply(any=is_any)
        told, round = self.ended.report(client, request.seen, request.round)
        ended = [worker_pb2.EndedSample(request_id=one, size_bytes=1) for one in told]
        ended += [worker_pb2.EndedSample(request_id=one, failed=True) for one in lost]
        return worker_pb2.AwaitSamplesReply(any=bool(ended), ended=ended, round=round)

    @override
    async def RenderPrompt(
        self, request: worker_pb2.RenderPromptRequest, context: Context
    ) -> worker_pb2.RenderPromptReply:
        """Render a token for each character; behind recorded tokens, only those of the messages after them."""
        self.prompts.append(request)
        if self.prompt_refusal:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.prompt_refusal)
        text = request.text or request.conversation
        if request.HasField("recorded") and not self.obstacle:
            text = json.dumps(json.loads(text)[request.recorded.messages :])
        obstacle = self.obstacle if request.HasField("recorded") else worker_pb2.NO_OBSTACLE
        tokens = array("i", list(text.encode())).tobytes()
        return worker_pb2.RenderPromptReply(tokens=tokens, end_tokens=[END_TOKEN], obstacle=obstacle)

    @override
    async def AwaitText(self, request: worker_pb2.AwaitTextRequest, context: Context) -> worker_pb2.AwaitTextReply:
        """Answer with the text. A withheld sample has its first piece only."""
        is_held = request.request_id in self.withheld or self.withholds_texts
        if is_held and request.seen:
            self.on_text()
        if self.text_breaks:
            self.text_breaks -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was closed")
        sample = self.samples.get(request.request_id)
        if sample is None:
            return worker_pb2.AwaitTextReply(not_found=worker_pb2.NotFound())
        first = worker_pb2.TextPiece(content="Hello")
        if self.reasoning:
            first = worker_pb2.TextPiece(reasoning=self.reasoning, content="Hello")
        if self.tool_call is not None:
            first.tool_call.CopyFrom(self.tool_call)
        texts = [worker_pb2.TextPiece(sequence=index) for index in range(sample.num_samples)]
        for text in texts:
            text.MergeFrom(first)
        if is_held:
            if request.seen:
                await asyncio.sleep(request.timeout_seconds)
            pending = worker_pb2.Pending()
            return worker_pb2.AwaitTextReply(pieces=texts[request.seen :], pending=pending, sampled_tokens=len(texts))
        end = worker_pb2.SequenceEnd(reason=wire_pb2.LENGTH, tokens=5)
        ends = [worker_pb2.TextPiece(sequence=index, end=end) for index in range(sample.num_samples)]
        return worker_pb2.AwaitTextReply(
            pieces=[*texts, *ends][request.seen :],
            end=worker_pb2.TextEnd(prompt_cache_hit_tokens=1, sequences=_drawn(sample)),
            sampled_tokens=5 * sample.num_samples,
        )

    @override
    async def CancelSample(
        self, request: worker_pb2.CancelSampleRequest, context: Context
    ) -> worker_pb2.CancelSampleReply:
        self.cancelled.append(request.request_id)
        return worker_pb2.CancelSampleReply()

    @override
    async def ReadTokenizer(
        self, request: worker_pb2.ReadTokenizerRequest, context: Context
    ) -> worker_pb2.ReadTokenizerReply:
        if self.tokenizer_held is not None:
            await self.tokenizer_held.wait()
        if self.tokenizer_refusal:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self.tokenizer_refusal)
        digest = hashlib.sha256(repr(sorted(self.tokenizer.items())).encode()).hexdigest()
        if digest == request.known_digest:
            return worker_pb2.ReadTokenizerReply(digest=digest)
        self.tokenizers_sent += 1
        return worker_pb2.ReadTokenizerReply(digest=digest, files=self.tokenizer)

    @override
    async def TakeUsage(self, request: worker_pb2.TakeUsageRequest, context: Context) -> worker_pb2.TakeUsageReply:
        used, self.used = self.used, []
        return worker_pb2.TakeUsageReply(usage=used)

    @override
    async def Timeline(self, request: worker_pb2.TimelineRequest, context: Context) -> worker_pb2.TimelineReply:
        return worker_pb2.TimelineReply(spans=self.spans)

    async def Prepare(self, request: worker_pb2.PrepareRequest, context: Context) -> worker_pb2.PrepareReply:
        self.prepared.append(request.adapter)
        return worker_pb2.PrepareReply()

    @override
    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> worker_pb2.EventsReply:
        def news() -> list[worker_pb2.Event]:
            return [event for event in self.events if event.event_id > request.after_event_id]

        self.drains += request.timeout_seconds == 0
        with contextlib.suppress(TimeoutError):
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(news), request.timeout_seconds)
        return worker_pb2.EventsReply(events=news())

    # ---- what becomes of work

    async def _wait(self, look: Callable[[], worker_pb2.AwaitReply | None], seconds: float) -> worker_pb2.AwaitReply:
        async def until_there() -> worker_pb2.AwaitReply:
            async with self._changed:
                while (found := look()) is None:
                    self._awaiting.set()
                    await self._changed.wait()
                return found

        try:
            return look() or await asyncio.wait_for(until_there(), seconds)
        except TimeoutError:
            return worker_pb2.AwaitReply(pending=worker_pb2.Pending())

    def _settle(self, request: worker_pb2.SubmitRequest) -> None:
        outcome = self._outcome(request)
        if outcome.HasField("result"):
            outcome.result.event_id = 0 if _save_in(request) is None else len(self.events)
        self.outcomes[request.model_id, request.seq_id] = outcome

    def _outcome(self, request: worker_pb2.SubmitRequest) -> worker_pb2.AwaitReply:
        if request.HasField("rejection"):
            return worker_pb2.AwaitReply(failure=request.rejection)
        match request.kind:
            case worker_pb2.CREATE_MODEL | worker_pb2.LOAD_MODEL:
                made = json_result({"model_id": request.model_id, "type": "create_model"})
                return self._not_created(request.model_id, self.create_failure) if self.create_failure else made
            case worker_pb2.FORWARD_BACKWARD:
                output = wire_pb2.ForwardBackwardOutput(metrics={"loss:sum": float(request.seq_id)})
                return proto_result(output.SerializeToString())
            case worker_pb2.OPTIM_STEP:
                self._report(step_done=self._step(request))
        save = _save_in(request)
        outcome = json_result({"metrics": {}}) if save is None else self._save(request, save)
        if request.kind == worker_pb2.RELEASE_MODEL:
            reason = worker_pb2.ReleaseModel.FromString(request.payload).reason
            self._report(model_released=worker_pb2.ModelReleased(model_id=request.model_id, reason=reason))
        return outcome

    def _not_created(self, model_id: str, message: str) -> worker_pb2.AwaitReply:
        failed = user_failure(message)
        self._report(model_failed=worker_pb2.ModelFailed(model_id=model_id, failure=failed.failure))
        return failed

    def _step(self, request: worker_pb2.SubmitRequest) -> worker_pb2.StepDone:
        """Return a step as a worker reports it; the numbers only tell steps apart."""
        steps = [event.step_done.model_id for event in self.events if event.HasField("step_done")]
        return worker_pb2.StepDone(
            model_id=request.model_id,
            position=request.seq_id,
            step=steps.count(request.model_id) + 1,
            tokens=2,
            loss=1 / request.seq_id,
            grad_norm=float(request.seq_id),
            learning_rate=worker_pb2.OptimStep.FromString(request.payload).learning_rate,
            seconds=0.5,
            sampler_gap=math.nan,
        )

    def _report(self, **what: Any) -> None:
        self.events.append(worker_pb2.Event(event_id=len(self.events) + 1, epoch=self.epoch, time=time.time(), **what))

    def _save(self, request: worker_pb2.SubmitRequest, save: worker_pb2.SaveWeights) -> worker_pb2.AwaitReply:
        if save.name_taken and not save.overwrite:
            return user_failure(f"{save.name} exists already")
        directory = f"runs/{request.seq_id}-{uuid.uuid4().hex}"
        saved = worker_pb2.CheckpointSaved(
            model_id=request.model_id,
            seq_id=request.seq_id,
            kind=save.kind,
            name=save.name,
            directory=directory,
            manifest_digest=self._write(directory),
            size_bytes=SAVED_BYTES,
            ttl_seconds=save.ttl_seconds if save.HasField("ttl_seconds") else None,
            user_metadata=save.user_metadata,
            has_user_metadata=save.has_user_metadata,
            overwrite=save.overwrite,
            sampling_session_id=save.sampling_session_id,
            lora=LORA,
        )
        self._report(checkpoint_saved=saved)
        if save.kind == worker_pb2.EPHEMERAL:
            return json_result({"sampling_session_id": save.sampling_session_id})
        kinds = {worker_pb2.TRAINING: "weights", worker_pb2.SAMPLER: "sampler_weights"}
        kind = kinds.get(save.kind, "external_weights")
        return json_result({"path": f"tinker://{request.model_id}/{kind}/{save.name}", "type": "save_weights"})

    def _write(self, directory: str) -> str:
        """Files of a checkpoint as a worker leaves them; returns the manifest's digest."""
        if self.checkpoints is None:
            return "0" * 64
        return write_checkpoint(self.checkpoints / directory, self.saved_files)

    def _sampled(self, request_id: str) -> worker_pb2.AwaitReply | None:
        request = self.samples[request_id]
        if request_id in self.withheld:
            return None
        if request.HasField("rejection"):
            return worker_pb2.AwaitReply(failure=request.rejection)
        sequence = wire_pb2.SampledSequence(stop_reason=wire_pb2.LENGTH, tokens=bytes(4))
        sequences = [sequence] * request.num_samples
        return proto_result(wire_pb2.SampleResponse(sequences=sequences).SerializeToString())


def _drawn(sample: worker_pb2.SampleRequest) -> list[wire_pb2.SampledSequence]:
    """Return the tokens of the answer, other ones than its text would be rendered to."""
    if not sample.reading.sequences:
        return []
    tokens, logprobs = array("i", [*DRAWN, END_TOKEN]).tobytes(), array("f", DRAWN_LOGPROBS).tobytes()
    return [wire_pb2.SampledSequence(tokens=tokens, logprobs=logprobs)] * sample.num_samples


def write_checkpoint(folder: Path, files: Mapping[str, bytes]) -> str:
    """Write read-only files and their manifest, as a worker does, and return the manifest's digest."""
    entries = {
        name: {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
        for name, content in files.items()
    }
    manifest = json.dumps({"files": entries}).encode()
    folder.mkdir(parents=True)
    for name, content in {**files, "manifest.json": manifest}.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o444)
    return hashlib.sha256(manifest).hexdigest()


def _save_in(request: worker_pb2.SubmitRequest) -> worker_pb2.SaveWeights | None:
    if request.kind == worker_pb2.SAVE_WEIGHTS:
        return worker_pb2.SaveWeights.FromString(request.payload)
    if request.kind == worker_pb2.RELEASE_MODEL:
        release = worker_pb2.ReleaseModel.FromString(request.payload)
        return release.final_checkpoint if release.HasField("final_checkpoint") else None
    return None


def user_failure(message: str) -> worker_pb2.AwaitReply:
    return worker_pb2.AwaitReply(failure=worker_pb2.Failure(category=worker_pb2.USER, message=message))


def json_result(content: dict[str, Any]) -> worker_pb2.AwaitReply:
    payload = json.dumps(content).encode()
    return worker_pb2.AwaitReply(result=worker_pb2.Result(payload=payload))


def proto_result(payload: bytes) -> worker_pb2.AwaitReply:
    return worker_pb2.AwaitReply(result=worker_pb2.Result(payload=payload, protobuf=True))


def _tenant_of(context: Context) -> str:
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata[TENANT_METADATA], "utf-8")  # type: ignore[arg-type]


async def serve_fake_worker(worker: FakeWorker, socket: Path) -> grpc.aio.Server:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server
