"""The protocol as it is promised, in one thread and one place: without a network, a disk, or a process that could end.

What it says is compared with what the real server and worker answer (`machine.py`). Arithmetic is that of the reference
engine, which each model here has for itself, and which sees its operations one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson
from support.engine.reference import ReferenceEngine
from tinsmith_rpc import wire_pb2
from tinsmith_trainer.engines.base import AdamParams, AdapterState, LoraSpec, Outcome, Work
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.wire.codec import decode_forward_backward, encode_forward_backward, open_body

ADAM = AdamParams(learning_rate=0.125, beta1=0.5, beta2=0.75, eps=2.0**-20, weight_decay=0.0, grad_clip_norm=0.0)
LORA = LoraSpec(rank=4, alpha=32.0, seed=7, train_attn=True, train_mlp=False, train_unembed=False)
Position = tuple[int, int]
"""A client's number and 0. A plain call has the number behind which it was accepted, and its place there, from 1 on."""
END = (10**9, 0)
"""A position behind every position that a client uses."""

Kind = Literal["create", "forward_backward", "optim_step", "save", "load"]


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request under a number. `body` is a forward_backward's, `name` that of the checkpoint."""

    kind: Kind
    body: bytes = b""
    name: str = ""
    forward_only: bool = False

    def message(self, model_id: str, number: int) -> bytes:
        """Return a forward_backward as it is sent: the head is a message of its own, and the body is behind it."""
        return wire_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=number).SerializeToString() + self.body


@dataclass(frozen=True, slots=True)
class Ready:
    payload: bytes


@dataclass(frozen=True, slots=True)
class Failed:
    """A failure that is the user's fault, with a message that contains these words."""

    says: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits for a number below it, which has not come."""


@dataclass(frozen=True, slots=True)
class Over:
    """A request whose model had ended before it came: it is gone, or fails with that reason."""


Answer = Ready | Failed | Waiting | Over
WAITING, OVER = Waiting(), Over()


@dataclass(frozen=True, slots=True)
class Step:
    """A point of the run's series."""

    step: int
    tokens: int
    loss: float | None
    grad_norm: float

    @classmethod
    def of(cls, window: Sequence[Outcome], metrics: Mapping[str, float]) -> Step:
        terms = sum(outcome.metrics["tokens:sum"] for outcome in window)
        loss = sum(outcome.metrics["loss:sum"] for outcome in window) / terms if terms else None
        tokens = sum(outcome.input_tokens for outcome in window)
        return cls(int(metrics["step"]), tokens, loss, metrics["grad_norm"])


@dataclass
class ModelReference:
    """One model: an adapter, an optimizer and a queue of calls."""

    model_id: str
    shelf: dict[str, AdapterState]
    """The training checkpoints of all models, by their paths."""
    is_open: bool = True
    accepted: dict[Position, Call] = field(default_factory=dict)
    answers: dict[Position, Answer] = field(default_factory=dict)
    applied: Position = (0, 0)
    closed_below: Position = (0, 0)
    window_is_broken: bool = False
    steps: list[Step] = field(default_factory=list)
    _window: list[Outcome] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engine = ReferenceEngine()
        self.engine.create_adapter(self.model_id, LORA)
        self.accepted[0, 0] = Call("create")
        self.answers[0, 0] = Ready(orjson.dumps({"model_id": self.model_id, "type": "create_model"}))

    # ---- what happens to it

    def accept(self, number: int, call: Call) -> None:
        """Accept the first request under a number. Repeats of the number change nothing."""
        if (number, 0) not in self.accepted:
            self._accept((number, 0), call)

    def accept_plain(self, call: Call) -> Position:
        """Accept a request without a number, behind all that are accepted. It closes no gap below it."""
        number, place = max(self.accepted)
        self._accept((number, place + 1), call)
        return number, place + 1

    def _accept(self, position: Position, call: Call) -> None:
        self.accepted[position] = call
        if not self.is_open:
            self.answers[position] = OVER
        elif position <= self.applied or position < self.closed_below:
            self.answers[position] = Failed("came too late")
        else:
            if call.kind != "forward_backward" and not position[1]:
                self._close_below(position)
            self._run()

    def time_passes(self) -> None:
        """Let so much time pass that no request waits for the numbers below the lowest waiting one."""
        if self.is_open and (waiting := self._waiting()):
            self._close_below(waiting[0])
            self._run()

    def end(self) -> None:
        """End the model after all accepted requests."""
        if self.is_open:
            self._close_below(END)
            self._run()
            self.is_open = False

    # ---- what is said of it

    def answer(self, position: Position) -> Answer:
        return self.answers.get(position, WAITING)

    def numbers(self) -> list[int]:
        """Return the numbers of the accepted calls after the creation that have one."""
        return sorted(number for number, place in self.accepted if number and not place)

    def missing(self) -> list[int]:
        """Numbers below an accepted one, under which nothing came."""
        return [number for number in range(1, max(self.accepted)[0]) if (number, 0) not in self.accepted]

    def state(self) -> AdapterState:
        return self.engine.state(self.model_id)

    # ---- the order

    def _waiting(self) -> list[Position]:
        return sorted(position for position in self.accepted if position not in self.answers)

    def _close_below(self, position: Position) -> None:
        self.closed_below = max(self.closed_below, position)

    def _run(self) -> None:
        for position in self._waiting():
            number, place = position
            if (number if place else number - 1) > self.applied[0]:
                if position > self.closed_below:
                    return
                self.window_is_broken = True  # what never came may have been a gradient
            self.answers[position] = self._outcome(number, self.accepted[position])
            self.applied = position

    # ---- the calls

    def _outcome(self, number: int, call: Call) -> Answer:
        try:
            match call.kind:
                case "forward_backward":
                    return self._forward_backward(number, call)
                case "optim_step":
                    return self._optim_step()
                case "save":
                    return self._save(call.name)
                case "load":
                    return self._load(call.name)
        except UserError as error:
            return Failed(str(error))

    def _forward_backward(self, number: int, call: Call) -> Answer:
        """Run a forward_backward.

        One that failed or cannot be read may have been a gradient; a forward alone was none.
        """
        try:
            request = decode_forward_backward(open_body(call.message(self.model_id, number), zstd=False))
            running = self.engine.start(Work(self.model_id, request.datums, request.loss, request.forward_only))
        except UserError:
            self.window_is_broken |= not call.forward_only
            raise
        while running.next_tokens:
            self.engine.advance([running])
        outcome = self.engine.finish(running)
        if not request.forward_only:
            self._window.append(outcome)
        return Ready(encode_forward_backward(outcome))

    def _optim_step(self) -> Answer:
        """Run a step. A window that is not whole fails its step, and no later one."""
        window, self._window = self._window, []
        if self.window_is_broken:
            self.window_is_broken = False
            self.engine.clear_gradients(self.model_id)
            return Failed("optim_step was not applied")
        metrics = self.engine.optim_step(self.model_id, ADAM)
        self.steps.append(Step.of(window, metrics))
        return Ready(orjson.dumps({"metrics": metrics, "grad_norm": metrics["grad_norm"]}))

    def _save(self, name: str) -> Answer:
        path = f"tinker://{self.model_id}/weights/{name}"
        if path in self.shelf:
            return Failed("exists already")
        self.shelf[path] = self.state()
        return Ready(orjson.dumps({"path": path, "type": "save_weights"}))

    def _load(self, path: str) -> Answer:
        """Load with the optimizer. A failure of the window is gone with its gradients."""
        loaded = self.shelf[path]
        self.engine.load_state(self.model_id, loaded, with_optimizer=True)
        self.engine.clear_gradients(self.model_id)
        self.window_is_broken, self._window = False, []
        return Ready(orjson.dumps({"path": path, "model_id": self.model_id, "type": "load_weights"}))


@dataclass
class SampleReference:
    """One sample that a sampler has taken: in its memory alone, so gone with it, and then submitted again."""

    seed: int
    state: Literal["held", "drawn", "cancelled", "lost"]

    def payload(self) -> bytes:
        """One token, which the seed says."""
        sequence = wire_pb2.SampledSequence(
            stop_reason=wire_pb2.STOP, tokens=self.seed.to_bytes(4, "little"), logprobs=bytes(4)
        )
        return wire_pb2.SampleResponse(sequences=[sequence]).SerializeToString()
