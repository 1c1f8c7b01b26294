"""Random sequences of what clients, processes and time do, each step compared with the reference.

A number that is missing is waited for until time passes, so a sequence knows at each step what a poll must say,
whatever the server and the worker are at meanwhile: only what was acknowledged counts, and clients repeat what was not.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.protocol.clients import KINDS, PLAIN_KINDS, Model, Sample, Session, call_of, request_of
from support.protocol.installation import Death, Installation, empty_store
from support.protocol.lines import Response
from support.protocol.reference import (
    LORA,
    OVER,
    WAITING,
    Call,
    Failed,
    ModelReference,
    Position,
    Ready,
    SampleReference,
    Step,
)
from support.server.fake_fleet import BASE_MODEL
from tinsmith_trainer.engines.base import AdapterState
from tinsmith_trainer.oplog.model_queues import GAP_CLOSES_AFTER_SECONDS
from typing_extensions import override

T = TypeVar("T")

ANSWER_SECONDS = 12.0
SEQUENCES_AN_INSTALLATION = 100
"""A start reads what all those before have left."""
ONE_OF_MANY = st.integers(0, 30)
DEATHS: tuple[Death, ...] = ("worker", "worker", "worker", "server", "both", "worker's clean stop")
LATER_STEPS = st.integers(0, 12)
"""The times of the event loop before a process dies."""


class ProtocolMachine(RuleBasedStateMachine):
    """`step` names are what a failing sequence is printed with."""

    runner: ClassVar[asyncio.Runner | None] = None
    installation: ClassVar[Installation | None] = None
    folder: ClassVar[tempfile.TemporaryDirectory[str] | None] = None
    sequences: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.sessions: list[Session] = []
        self.models: list[Model] = []
        self.shelf: dict[str, AdapterState] = {}
        self.loadable: set[str] = set()
        self.steps: list[str] = []

    # ---- clients that begin and end

    @initialize()
    def first_model(self) -> None:
        self.run(self._create(None))

    @precondition(lambda self: len(self.models) < 4)
    @rule(session=st.none() | ONE_OF_MANY)
    def create_model(self, session: int | None) -> None:
        self.run(self._create(session))

    @rule(which=ONE_OF_MANY)
    def finish_session(self, which: int) -> None:
        """Finish the session. Accepted work runs as far as it can; later work is refused."""
        session = self._one_of(self.sessions, which)
        self.run(self._finish(session))

    @precondition(lambda self: self._open_models())
    @rule(which=ONE_OF_MANY)
    def unload(self, which: int) -> None:
        self.run(self._unload(self._one_of(self._open_models(), which)))

    # ---- calls with numbers

    @precondition(lambda self: self._open_models())
    @rule(which=ONE_OF_MANY, client=st.integers(0, 1), kind=st.sampled_from(KINDS), seed=ONE_OF_MANY)
    def send(self, which: int, client: int, kind: str, seed: int) -> None:
        """Two clients that number by themselves may both use one: then the first has it."""
        model = self._one_of(self._open_models(), which)
        self.run(self._send(model, model.next_number(client), self._call(kind, seed)))

    @precondition(lambda self: self._open_models())
    @rule(which=ONE_OF_MANY, client=st.integers(0, 1), chunks=st.integers(2, 4), seed=ONE_OF_MANY)
    def send_chunks(self, which: int, client: int, chunks: int, seed: int) -> None:
        """Send chunks as the SDK does: the later ones at once, the first when all of them are acknowledged."""
        model = self._one_of(self._open_models(), which)
        numbers = [model.next_number(client) for _ in range(chunks)]
        calls = [self._call("forward_backward", seed + number) for number in numbers]
        self.run(self._send_chunks(model, list(zip(numbers, calls, strict=True))))

    @precondition(lambda self: self._open_models())
    @rule(which=ONE_OF_MANY, client=st.integers(0, 1))
    def skip_a_number(self, which: int, client: int) -> None:
        """Skip a number, as a program does that ends in the middle of a call."""
        self._one_of(self._open_models(), which).next_number(client)

    @precondition(lambda self: any(model.reference.missing() for model in self._open_models()))
    @rule(which=ONE_OF_MANY, kind=st.sampled_from(KINDS), seed=ONE_OF_MANY)
    def send_what_is_missing(self, which: int, kind: str, seed: int) -> None:
        """Send what is missing, in time or too late."""
        models = [model for model in self._open_models() if model.reference.missing()]
        model = self._one_of(models, which)
        number = self._one_of(model.reference.missing(), which)
        self.run(self._send(model, number, self._call(kind, seed)))

    @precondition(lambda self: any(model.reference.numbers() for model in self._open_models()))
    @rule(which=ONE_OF_MANY, number=ONE_OF_MANY, kind=st.sampled_from(KINDS), seed=ONE_OF_MANY)
    def repeat(self, which: int, number: int, kind: str, seed: int) -> None:
        """Repeat a submit under a used number, which changes nothing whatever the body is."""
        models = [model for model in self._open_models() if model.reference.numbers()]
        model = self._one_of(models, which)
        taken = self._one_of(model.reference.numbers(), number)
        self.run(self._send(model, taken, self._call(kind, seed)))

    # ---- calls without numbers, on the same models

    @precondition(lambda self: self._open_models())
    @rule(which=ONE_OF_MANY, kind=st.sampled_from(PLAIN_KINDS), seed=ONE_OF_MANY)
    def send_plain(self, which: int, kind: str, seed: int) -> None:
        model = self._one_of(self._open_models(), which)
        self.run(self._send_plain(model, self._new_key(model), self._plain_call(kind, seed)))

    @precondition(lambda self: any(model.plain_calls for model in self._open_models()))
    @rule(which=ONE_OF_MANY, key=ONE_OF_MANY, seed=ONE_OF_MANY)
    def repeat_plain(self, which: int, key: int, seed: int) -> None:
        """Repeat a plain call with its key, which changes nothing whatever else the body says."""
        model = self._one_of([model for model in self._open_models() if model.plain_calls], which)
        taken = self._one_of(list(model.plain_calls), key)
        kind = model.reference.accepted[model.plain_calls[taken]].kind
        self.run(self._send_plain(model, taken, self._plain_call(kind, seed)))

    @precondition(lambda self: self._open_models())
    @rule(
        which=ONE_OF_MANY,
        kind=st.sampled_from(PLAIN_KINDS),
        seed=ONE_OF_MANY,
        what=st.sampled_from(DEATHS),
        later=LATER_STEPS,
    )
    def kill_under_a_plain_call(self, which: int, kind: str, seed: int, what: Death, later: int) -> None:
        model = self._one_of(self._open_models(), which)
        self.run(self._die_under_plain(model, self._new_key(model), self._plain_call(kind, seed), what, later))

    @rule(which=ONE_OF_MANY, number=ONE_OF_MANY)
    def poll(self, which: int, number: int) -> None:
        model = self._one_of(self.models, which)
        self.run(self._check(model, self._one_of(sorted(model.reference.accepted), number)))

    @rule()
    def time_passes(self) -> None:
        """Let time pass until no model waits for what is missing."""
        self.run(self._let_time_pass())

    # ---- samples

    @precondition(lambda self: self._open_sessions())
    @rule(which=ONE_OF_MANY, seed=ONE_OF_MANY)
    def sample(self, which: int, seed: int) -> None:
        self.run(self._sample(self._one_of(self._open_sessions(), which), seed))

    @precondition(lambda self: self._samples())
    @rule(which=ONE_OF_MANY, act=st.sampled_from(("end", "cancel", "submit again", "poll")))
    def with_a_sample(self, which: int, act: str) -> None:
        self.run(self._with_sample(self._one_of(self._samples(), which), act))

    # ---- deaths

    @rule(what=st.sampled_from(DEATHS))
    def kill(self, what: Death) -> None:
        self.run(self._kill(what))

    @precondition(lambda self: self._open_models())
    @rule(
        which=ONE_OF_MANY,
        kind=st.sampled_from(KINDS),
        seed=ONE_OF_MANY,
        what=st.sampled_from(DEATHS),
        later=LATER_STEPS,
    )
    def kill_under_a_call(self, which: int, kind: str, seed: int, what: Death, later: int) -> None:
        """Between any two steps of the server with it. Its client sends it again until it is acknowledged."""
        model = self._one_of(self._open_models(), which)
        self.run(self._die_under(model, model.next_number(0), self._call(kind, seed), what, later))

    # ---- the end

    @override
    def teardown(self) -> None:
        try:
            if self.installation is not None:
                self.run(self._settle())
                type(self).sequences += 1
        finally:
            if self.sequences >= SEQUENCES_AN_INSTALLATION:
                self.discard()

    @classmethod
    def discard(cls) -> None:
        """Discard the installation with all its files."""
        try:
            if cls.runner is not None and cls.installation is not None:
                cls.runner.run(cls.installation.close())
        finally:
            if cls.runner is not None:
                cls.runner.close()
            if cls.folder is not None:
                cls.folder.cleanup()
            cls.runner = cls.installation = cls.folder = None
            cls.sequences = 0

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        """Run a sequence. A sequence that failed leaves an installation that the next one must not have."""
        cls = type(self)
        if cls.runner is None:
            cls.runner = asyncio.Runner()
            cls.folder = tempfile.TemporaryDirectory(prefix="protocol-")
            cls.installation = cls.runner.run(_opened(Path(cls.folder.name)))
        self.steps.append(_description(step))
        try:
            return cls.runner.run(step)
        except BaseException as error:
            # Where the moment decides, hypothesis may not see it again, and then prints none of this.
            error.add_note("\n".join(self.steps))
            self.discard()
            raise

    @property
    def here(self) -> Installation:
        assert self.installation is not None
        return self.installation

    # ---- what rules choose from

    @staticmethod
    def _one_of(many: list[T], which: int) -> T:
        return many[which % len(many)]

    def _open_sessions(self) -> list[Session]:
        return [session for session in self.sessions if not session.finished]

    def _open_models(self) -> list[Model]:
        return [model for model in self.models if not model.session.finished]

    def _samples(self) -> list[Sample]:
        return [sample for session in self._open_sessions() for sample in session.samples]

    def _call(self, kind: str, seed: int) -> Call:
        return call_of(kind, seed, sorted(self.loadable))

    def _plain_call(self, kind: str, seed: int) -> Call:
        return self._call("optim_step" if kind == "load" and not self.loadable else kind, seed)

    @staticmethod
    def _new_key(model: Model) -> str:
        return f"key-{len(model.plain_calls)}"

    # ---- steps

    async def _create(self, which: int | None) -> None:
        session = await self._session() if which is None or not self._open_sessions() else None
        session = session or self._one_of(self._open_sessions(), which or 0)
        lora = {"rank": LORA.rank, "seed": LORA.seed}
        body = {
            "session_id": session.session_id,
            "model_seq_id": len(session.models),
            "base_model": BASE_MODEL,
            "lora_config": lora,
        }
        made = await self._acknowledged("/create_model", body)
        model = Model(session, ModelReference(made["model_id"], self.shelf))
        session.models.append(model)
        self.models.append(model)

    async def _session(self) -> Session:
        made = await self._acknowledged("/create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})
        session = Session(made["session_id"])
        self.sessions.append(session)
        return session

    async def _finish(self, session: Session) -> None:
        body = {"reason": {"type": "success"}}
        answer = await self.here.post(f"/sessions/{session.session_id}/finish", body)
        assert answer.status_code == 200, answer.text
        session.finished = True
        for model in session.models:
            model.reference.end()

    async def _unload(self, model: Model) -> None:
        body = {"model_id": model.model_id}
        request_id = (await self._acknowledged("/unload_model", body))["request_id"]
        model.reference.end()
        answer = await self._polled(request_id)
        assert answer.json() == {"model_id": model.model_id, "type": "unload_model"}, answer.text

    async def _send(self, model: Model, number: int, call: Call) -> None:
        path, body = request_of(model.model_id, number, call)
        answer = await self._repeated(path, body)
        self._note(model, number, call, answer)

    async def _send_chunks(self, model: Model, chunks: list[tuple[int, Call]]) -> None:
        first, *others = chunks
        await asyncio.gather(*(self._send(model, number, call) for number, call in others))
        await self._send(model, *first)

    async def _die_under(self, model: Model, number: int, call: Call, what: Death, later: int) -> None:
        path, body = request_of(model.model_id, number, call)
        request = self.here.begin(path, body)
        for _ in range(later):
            await asyncio.sleep(0)
        await self._kill(what)
        await asyncio.wait([request])
        await self._send(model, number, call)

    async def _send_plain(self, model: Model, key: str, call: Call) -> None:
        path, body = request_of(model.model_id, None, call)
        answer = await self._repeated(path, body, key)
        if not model.reference.is_open and answer.status_code == 410:
            return
        assert answer.status_code == 200, answer.text
        position = model.plain_calls.get(key)
        if position is None:
            position = model.plain_calls[key] = model.reference.accept_plain(call)
        request_id = answer.json()["request_id"]
        assert model.request_ids.setdefault(position, request_id) == request_id, answer.text

    async def _die_under_plain(self, model: Model, key: str, call: Call, what: Death, later: int) -> None:
        path, body = request_of(model.model_id, None, call)
        request = self.here.begin(path, body, key)
        for _ in range(later):
            await asyncio.sleep(0)
        await self._kill(what)
        await asyncio.wait([request])
        await self._send_plain(model, key, call)

    def _note(self, model: Model, number: int, call: Call, answer: Response) -> None:
        if not model.reference.is_open and answer.status_code == 410:
            return
        assert answer.status_code == 200, answer.text
        assert answer.json()["request_id"] == f"{model.model_id}:op:{number}", answer.text
        model.reference.accept(number, call)

    async def _acknowledged(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = await self._repeated(path, body)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    async def _repeated(self, path: str, body: dict[str, Any] | bytes, key: str = "") -> Response:
        """Retry as SDKs do after a 5xx."""
        until = time.monotonic() + ANSWER_SECONDS
        while (answer := await self.here.post(path, body, key)).status_code in (500, 503):
            assert time.monotonic() < until, answer.text
            await asyncio.sleep(0.01)
        return answer

    async def _polled(self, request_id: str) -> Response:
        """Poll until there is more to report than a pending result."""
        until = time.monotonic() + ANSWER_SECONDS
        while (answer := await self._poll(request_id)).status_code == 408:
            assert time.monotonic() < until, f"{request_id}: {answer.text}"
            if any(session.finished for session in self.sessions):
                await self.here.services.background.reap_now()  # another replica would: this one has no lease yet
        return answer

    async def _poll(self, request_id: str) -> Response:
        body = {"request_id": request_id, "allow_metadata_only": False}
        return await self.here.post("/retrieve_future", body)

    async def _check(self, model: Model, position: Position) -> None:
        request_id, expected = model.request_id(position), model.reference.answer(position)
        if expected == WAITING:
            answer = await self._poll(request_id)
            assert answer.status_code == 408, f"{request_id} has not to wait: {answer.content!r}"
            return
        answer = await self._polled(request_id)
        model.checked.add(position)
        if position == (0, 0) and not model.reference.is_open and answer.status_code == 410:
            return  # its session was over before it had a worker
        match expected:
            case Ready(payload):
                assert answer.status_code == 200, answer.text
                assert answer.content == payload, f"{request_id}: {answer.content!r}, not {payload!r}"
                if model.reference.accepted[position].kind == "save":
                    self.loadable.add(answer.json()["path"])  # before its answer no client knows of it
            case Failed(says):
                content = answer.json()
                assert content.get("category") == "user", f"{request_id}: {answer.content!r}, not {expected}"
                assert says in content["error"], f"{request_id}: {content}, not {says!r}"
            case _:
                assert expected == OVER
                assert answer.status_code == 410 or answer.json().get("category") == "user", answer.text

    async def _check_all(self) -> None:
        for model in self.models:
            for position in model.reference.accepted.keys() - model.checked:
                await self._check(model, position)

    async def _let_time_pass(self) -> None:
        """Let time pass after all runnable work has run: time in which an operation ran is no waiting time."""
        await self._check_all()
        queues = self.here.worker.service.queues
        while any(queue.is_open and queue.order.next_turn() for queue in queues.all()):
            await asyncio.sleep(0.001)  # after a start what has an answer runs again
        queues.age_gaps(0)
        gaps = [(queue.order, gap) for queue in queues.all() if queue.is_open and (gap := queue.order.open_gap())]
        queues.age_gaps(GAP_CLOSES_AFTER_SECONDS)
        while any(order.closed_below < gap for order, gap in gaps):
            await asyncio.sleep(0.001)  # until that is in the journal a death opens them again, unknown to clients
        for model in self.models:
            model.reference.time_passes()

    async def _kill(self, what: Death) -> None:
        await self.here.kill(what)
        if what != "server":
            for model in self.models:
                model.checked.clear()
            for session in self.sessions:
                for sample in session.samples:
                    sample.reference.state = "lost"

    # ---- samples

    async def _sample(self, session: Session, seed: int) -> None:
        if session.sampler_id is None:
            body = {"session_id": session.session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
            session.sampler_id = (await self._acknowledged("/create_sampling_session", body))["sampling_session_id"]
        reference = SampleReference(seed, "held")
        sample = Sample(session.sampler_id, len(session.samples), "", reference)
        session.samples.append(sample)
        await self._submit(sample)

    async def _submit(self, sample: Sample) -> None:
        body = {
            "sampling_session_id": sample.sampler_id,
            "seq_id": sample.number,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 1, "seed": sample.reference.seed},
        }
        sample.request_id = (await self._acknowledged("/asample", body))["request_id"]
        sampler = self.here.worker.sampler
        if sample.reference.state in ("held", "lost"):
            while sample.request_id not in sampler.running:
                await asyncio.sleep(0)
            sample.reference.state = "held"

    async def _with_sample(self, sample: Sample, act: str) -> None:
        match act:
            case "end" if sample.reference.state == "held":
                self.here.worker.sampler.end(sample.request_id)
                sample.reference.state = "drawn"
            case "cancel":
                answer = await self.here.post("/cancel_future", {"request_id": sample.request_id})
                assert answer.status_code == 200, answer.text
                if sample.reference.state == "held":
                    sample.reference.state = "cancelled"
            case "submit again":
                await self._submit(sample)
        await self._check_sample(sample)

    async def _check_sample(self, sample: Sample) -> None:
        if sample.reference.state == "held":
            assert (await self._poll(sample.request_id)).status_code == 408
            return
        answer = await self._polled(sample.request_id)
        match sample.reference.state:
            case "drawn":
                assert answer.content == sample.reference.payload(), answer.content
            case "cancelled":
                assert "cancelled" in answer.json()["error"], answer.text
            case "lost":
                assert answer.status_code == 410, answer.text

    # ---- the end

    async def _settle(self) -> None:
        """Every answer once more, and what the worker holds; then all of it goes."""
        await self._let_time_pass()
        for model in self._open_models():
            await self._send_last_words(model)
        await self._check_all()
        for session in self._open_sessions():
            await self._finish(session)
        await self._released()
        for model in self.models:
            await self._check_series(model)

    async def _check_series(self, model: Model) -> None:
        """Check that each step stands in the series of its run, once and with the figures of its gradients."""
        await self.here.services._events.drain(self.here.worker.worker_id)
        model_id = model.reference.model_id
        series = await self.here.services._store.run_steps(model_id, 0, 10_000)
        kept = [Step(one.step, one.tokens, one.loss, one.grad_norm or 0.0) for one in series]
        assert kept == model.reference.steps, f"{model_id}: {kept}, not {model.reference.steps}"

    async def _send_last_words(self, model: Model) -> None:
        """Return the window's weights, moments and steps, in which it differs from others."""
        number = max(model.reference.accepted)[0] + 1
        for kind in ("optim_step", "forward_backward", "optim_step", "forward"):
            await self._send(model, number, self._call(kind, number))
            number += 1

    async def _released(self) -> None:
        """Release the place for the next sequence."""
        until = time.monotonic() + ANSWER_SECONDS
        while any(queue.holds_a_place for queue in self.here.worker.service.queues.all()):
            await self.here.services.background.reap_now()
            assert time.monotonic() < until, "models of finished sessions were not released"


async def _opened(folder: Path) -> Installation:
    return await Installation.opened(folder, await empty_store(folder))


def _description(step: Coroutine[Any, Any, Any]) -> str:
    """Return the event's name and arguments."""
    arguments = step.cr_frame.f_locals.items()  # type: ignore[attr-defined]
    return f"{step.__name__} " + " ".join(f"{name}={value}" for name, value in arguments if name != "self")
