"""The state of the clients of a sequence, and their requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from support.protocol.reference import ADAM, Call, ModelReference, Position, SampleReference
from support.worker.messages import forward_backward, next_token_datum

KINDS = ("forward_backward", "forward", "no token", "unreadable", "optim_step", "save", "load")
PLAIN_KINDS = ("optim_step", "save", "load")
"""The calls in JSON, which may come without a number."""
NO_TOKEN = 99


@dataclass
class Model:
    """A model as its clients know it, and what they may expect."""

    session: Session
    reference: ModelReference
    next_numbers: list[int] = field(default_factory=lambda: [1, 1])
    """The numbers of its two clients, which number independently."""
    checked: set[Position] = field(default_factory=set)
    """The answers that were seen since the worker last began."""
    plain_calls: dict[str, Position] = field(default_factory=dict)
    """The positions of acknowledged plain calls, by their keys."""
    request_ids: dict[Position, str] = field(default_factory=dict)

    @property
    def model_id(self) -> str:
        return self.reference.model_id

    def __str__(self) -> str:
        return self.model_id

    def request_id(self, position: Position) -> str:
        """Return the ID by which clients poll. The server chooses those of plain calls."""
        return self.request_ids.get(position) or f"{self.model_id}:op:{position[0]}"

    def next_number(self, client: int) -> int:
        self.next_numbers[client] += 1
        return self.next_numbers[client] - 1


@dataclass
class Session:
    session_id: str
    models: list[Model] = field(default_factory=list)
    sampler_id: str | None = None
    samples: list[Sample] = field(default_factory=list)
    finished: bool = False

    def __str__(self) -> str:
        return self.session_id


@dataclass
class Sample:
    sampler_id: str
    number: int
    request_id: str
    reference: SampleReference


def call_of(kind: str, seed: int, shelf: Sequence[str]) -> Call:
    """Return a call of one of `KINDS`.

    What it loads is one of `shelf`; while that is empty, it is a forward_backward.
    """
    if kind == "optim_step":
        return Call("optim_step")
    if kind == "save":
        return Call("save", name=f"name-{seed % 3}")
    if kind == "load" and shelf:
        return Call("load", name=shelf[seed % len(shelf)])
    if kind == "unreadable":
        return Call("forward_backward", b"\xff" + seed.to_bytes(1, "little"))
    tokens = [seed % 31, 3, seed * 7 % 29, 1, NO_TOKEN if kind == "no token" else 5]
    forward_only = kind == "forward"
    body = forward_backward([next_token_datum(tokens)], model_id="", seq_id=0, forward_only=forward_only)
    return Call("forward_backward", body, forward_only=forward_only)


def request_of(model_id: str, number: int | None, call: Call) -> tuple[str, dict[str, Any] | bytes]:
    """Return the path and the body: JSON, or a protobuf message, possibly of several concatenated ones."""
    if call.kind == "forward_backward":
        assert number is not None, "a protobuf body has a number"
        return "/forward_backward", call.message(model_id, number)
    body: dict[str, Any] = {"model_id": model_id} | ({} if number is None else {"seq_id": number})
    match call.kind:
        case "optim_step":
            return "/optim_step", body | {"adam_params": asdict(ADAM)}
        case "save":
            return "/save_weights", body | {"path": call.name}
    return "/load_weights", body | {"path": call.name, "optimizer": True}
