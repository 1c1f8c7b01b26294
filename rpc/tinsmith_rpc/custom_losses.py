"""Custom losses as data: a graph that an SDK traced.

The graph is parsed from JSON, checked, and encoded in the loss's ID.

The nodes are torch.fx's nodes, as `tinker.types.CustomLossGraph` describes them. This module cannot run the graph. A
node contains the name of an operation, and the name must be in `custom_loss_operations`. Nodes refer only to earlier
nodes, so there are no cycles, and every number, text and list has a limit.

The ID of a loss contains the loss itself: its checked JSON, compressed and encoded as text. So any server or worker
that receives a call with this ID has the whole loss, whichever server made the ID, and even after a restart. Anyone can
make such an ID, so its content is checked again wherever it is decoded.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, TypeAlias, cast

from tinsmith_rpc.custom_loss_operations import FORBIDDEN_KEYWORDS, FUNCTIONS, METHODS

MAX_INPUTS = 16
MAX_NODES = 512
MAX_METRICS = 64
MAX_ARGUMENTS = 4096
"""The limit on the number of values among the arguments of all nodes, including values in lists."""
MAX_DEPTH = 6
MAX_TEXT = 128
MAX_WHOLE_NUMBER = 2**53
MAX_JSON_BYTES = 256 * 1024
MAX_ID_CHARACTERS = 32 * 1024
"""The limit on the length of an ID. A poll for the loss contains the ID, and the body of a poll has at most 64 KiB."""

DTYPES = frozenset({"float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "bool"})
_KNOWN_NAMES: Mapping[str, frozenset[str]] = {
    "dtype": DTYPES,
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format"}),
}
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}

_PREFIX = "loss1-"
_ID = re.compile(_PREFIX + r"[A-Za-z0-9_-]+=*")
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")

LOGPROBS = "logprobs"
ON_THE_CLIENT = "Pass the function itself to forward_backward_custom, and it runs on the client."


class CustomLossInvalid(ValueError):
    """An error for an invalid loss. The message is for the author of the loss."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """An input of the loss. A `rank` of 0 is a scalar, 1 is `[T]`, and 2 is `[T, K]`."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value by its number. The inputs are numbered first, in order, then the result of each call."""

    value: int


@dataclass(frozen=True, slots=True)
class Named:
    """A constant of torch. Devices are accepted but ignored, because the worker chooses the device of a loss."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


Scalar: TypeAlias = bool | int | float | str | None
Argument: TypeAlias = Scalar | EllipsisType | Ref | Named | slice | tuple[Any, ...] | list[Any] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function by its qualified name, or of a tensor's method.

    For a tensor's method, the tensor is the first of `args`.
    """

    name: str
    target: str
    is_method: bool
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument]


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """The loss of one datum. The loss is computed from `inputs`; the first input is `logprobs`.

    `loss` and `metrics` refer to the values that are returned.
    """

    name: str
    inputs: tuple[LossInput, ...]
    calls: tuple[Call, ...]
    loss: Ref
    metrics: Mapping[str, Ref]


def loss_id_of(content: Mapping[str, Any]) -> str:
    """Return the ID for the `name`, `inputs` and `graph` that an SDK sent. Raises CustomLossInvalid."""
    kept = {key: content.get(key) for key in ("name", "inputs", "graph")}
    text = _dumped(kept)
    read_custom_loss(kept)
    loss_id = _PREFIX + base64.urlsafe_b64encode(zlib.compress(text, 9)).decode()
    if len(loss_id) > MAX_ID_CHARACTERS:
        raise CustomLossInvalid(
            f"the loss takes {len(loss_id)} characters when it is packed; {MAX_ID_CHARACTERS} are the most. "
            + ON_THE_CLIENT
        )
    return loss_id


def is_loss_id(text: str) -> bool:
    """Return whether the text has the form of an ID. Only `loss_of` checks the content."""
    return len(text) <= MAX_ID_CHARACTERS and _ID.fullmatch(text) is not None


def loss_of(loss_id: str) -> CustomLoss:
    """Decode and check an id, which anyone may have made. Raises CustomLossInvalid."""
    if not is_loss_id(loss_id):
        raise CustomLossInvalid("loss_id is none that this server gave out; create the loss with create_custom_loss")
    try:
        packed = base64.b64decode(loss_id.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(packed, MAX_JSON_BYTES + 1)
        content = json.loads(text) if unpacker.eof and len(text) <= MAX_JSON_BYTES else None
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise CustomLossInvalid("loss_id is damaged; create the loss again with create_custom_loss") from error
    if not isinstance(content, dict):
        raise CustomLossInvalid("loss_id is damaged, or of a larger loss than this server takes")
    return read_custom_loss(content)


def _dumped(content: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise CustomLossInvalid(f"the loss cannot be written down: {error}") from error
    if len(text) > MAX_JSON_BYTES:
        raise CustomLossInvalid(f"the loss has {len(text)} bytes; {MAX_JSON_BYTES} are the most. " + ON_THE_CLIENT)
    return text


def read_custom_loss(content: Mapping[str, Any]) -> CustomLoss:
    """Parse a loss, and check everything that does not depend on shapes and types. Raises CustomLossInvalid."""
    name = _text(content.get("name"), "name")
    inputs = _read_inputs(content.get("inputs"))
    graph = content.get("graph")
    if not isinstance(graph, dict) or graph.get("format") != 1:
        raise CustomLossInvalid("graph must be an object of format 1")
    nodes = graph.get("nodes")
    if not isinstance(nodes, list) or not all(isinstance(node, dict) for node in nodes):
        raise CustomLossInvalid("graph.nodes must be a list of nodes")
    if len(nodes) > MAX_NODES:
        raise CustomLossInvalid(f"the graph has {len(nodes)} nodes; {MAX_NODES} are the most. {ON_THE_CLIENT}")
    return _Reader(inputs).read(name, nodes)


def _read_inputs(inputs: object) -> tuple[LossInput, ...]:
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= MAX_INPUTS:
        raise CustomLossInvalid(f"inputs must be a list of 1 to {MAX_INPUTS}, {LOGPROBS} first")
    read = tuple(_read_input(entry) for entry in inputs)
    names = [entry.name for entry in read]
    if names[0] != LOGPROBS or read[0].rank == 0:
        raise CustomLossInvalid(f"the first input must be {LOGPROBS}, of rank 1 or 2")
    if len(set(names)) < len(names):
        raise CustomLossInvalid("two inputs have the same name")
    return read


def _read_input(entry: object) -> LossInput:
    name, rank = (entry.get("name"), entry.get("rank")) if isinstance(entry, dict) else (None, None)
    if not isinstance(name, str) or not _INPUT_NAME.fullmatch(name):
        raise CustomLossInvalid("an input's name must be of small letters, digits and underscores, 64 at most")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank <= 2:
        raise CustomLossInvalid(f"the input {name} must have rank 0, 1 or 2")
    return LossInput(name, rank)


def _text(value: object, what: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not value.isprintable():
        raise CustomLossInvalid(f"{what} must be a text of 1 to {MAX_TEXT} printable characters")
    return value


class _Reader:
    """A reader of nodes, in order. A node may refer only to earlier nodes."""

    def __init__(self, inputs: tuple[LossInput, ...]) -> None:
        self._inputs = inputs
        self._numbers: dict[str, int] = {}
        self._calls: list[Call] = []
        self._arguments_left = MAX_ARGUMENTS

    def read(self, name: str, nodes: Sequence[Mapping[str, Any]]) -> CustomLoss:
        count = len(self._inputs)
        if len(nodes) <= count or nodes[-1].get("op") != "output":
            raise CustomLossInvalid("the graph must have a placeholder for each input, and end with its output")
        for expected, node in zip(self._inputs, nodes[:count], strict=True):
            self._take_placeholder(expected, node)
        for node in nodes[count:-1]:
            call = self._call(node)
            self._name(call.name)
            self._calls.append(call)
        loss, metrics = self._output(nodes[-1])
        return CustomLoss(name, self._inputs, tuple(self._calls), loss, metrics)

    def _take_placeholder(self, expected: LossInput, node: Mapping[str, Any]) -> None:
        if node.get("op") != "placeholder" or node.get("target") != expected.name:
            raise CustomLossInvalid(f"the graph needs a placeholder for the input {expected.name}, in inputs' order")
        self._name(_text(node.get("name"), "a node's name"))

    def _name(self, name: str) -> None:
        if name in self._numbers:
            raise CustomLossInvalid(f"two nodes are named {name!r}")
        self._numbers[name] = len(self._numbers)

    def _call(self, node: Mapping[str, Any]) -> Call:
        name, op = _text(node.get("name"), "a node's name"), node.get("op")
        target = _text(node.get("target"), f"the target of node {name!r}")
        if op not in ("call_function", "call_method"):
            raise CustomLossInvalid(f"node {name!r} is a {str(op)[:MAX_TEXT]!r}; functions and methods can be called")
        if target not in (METHODS if op == "call_method" else FUNCTIONS):
            raise CustomLossInvalid(
                f"node {name!r} calls {target!r}, which this server does not run: "
                "docs/reference/losses.md lists what it does. " + ON_THE_CLIENT
            )
        args, kwargs = node.get("args", []), node.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise CustomLossInvalid(f"node {name!r} must have a list of args and an object of kwargs")
        if forbidden := FORBIDDEN_KEYWORDS & kwargs.keys():
            raise CustomLossInvalid(
                f"node {name!r} has the argument {min(forbidden)!r}, which this server does not take"
            )
        read = tuple(self._argument(name, value) for value in args)
        if op == "call_method" and not (read and isinstance(read[0], Ref)):
            raise CustomLossInvalid(f"node {name!r} calls a method of nothing")
        return Call(name, target, op == "call_method", read, self._mapping(name, kwargs))

    def _output(self, node: Mapping[str, Any]) -> tuple[Ref, Mapping[str, Ref]]:
        args = node.get("args")
        output = self._argument("output", args[0]) if isinstance(args, list) and len(args) == 1 else None
        if not isinstance(output, tuple | list) or len(output) != 2:
            raise CustomLossInvalid("the output must be the loss and a dict of metrics")
        loss, metrics = output
        if not isinstance(loss, Ref) or not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
            raise CustomLossInvalid(f"the output must be a tensor and a dict of {MAX_METRICS} metrics at most")
        for key, value in metrics.items():
            if not _METRIC_NAME.fullmatch(key) or not isinstance(value, Ref):
                raise CustomLossInvalid(f"the metric {key!r} must be a tensor, named custom/<name>:sum or :mean")
        return loss, cast("dict[str, Ref]", metrics)

    def _argument(self, node: str, value: object, depth: int = 1) -> Argument:
        self._arguments_left -= 1
        if self._arguments_left < 0 or depth > MAX_DEPTH:
            raise CustomLossInvalid(
                f"the graph's arguments are more than {MAX_ARGUMENTS}, or lie more than {MAX_DEPTH} deep in each other"
            )
        match value:
            case None | bool() | int() | float() | str():
                return _scalar(node, value)
            case list():
                return [self._argument(node, entry, depth + 1) for entry in value]
            case dict() if len(value) == 1:
                [(kind, content)] = value.items()
                return self._object(node, kind, content, depth)
        raise CustomLossInvalid(f"node {node!r} has an argument that is no scalar, list or object of one key")

    def _object(self, node: str, kind: str, content: object, depth: int) -> Argument:
        match kind, content:
            case "ref", str():
                return self._ref(node, content)
            case (("tuple" | "slice"), list()):
                return _joined(node, kind, [self._argument(node, entry, depth + 1) for entry in content])
            case "dict", dict():
                return self._mapping(node, content, depth + 1)
            case "ellipsis", True:
                return ...
            case "float", ("inf" | "-inf" | "nan"):
                return _FLOATS[cast("str", content)]
            case (("dtype" | "device" | "layout" | "memory_format"), str()):
                return _named(node, kind, content)
        raise CustomLossInvalid(f"node {node!r} has an argument of the kind {kind[:MAX_TEXT]!r} that cannot be read")

    def _ref(self, node: str, name: str) -> Ref:
        if name not in self._numbers:
            raise CustomLossInvalid(f"node {node!r} refers to {name[:MAX_TEXT]!r}, which is no earlier node")
        return Ref(self._numbers[name])

    def _mapping(self, node: str, content: Mapping[str, object], depth: int = 1) -> dict[str, Any]:
        return {
            _text(key, f"a key of node {node!r}"): self._argument(node, value, depth) for key, value in content.items()
        }


def _scalar(node: str, value: Scalar) -> Argument:
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise CustomLossInvalid(f"node {node!r} has a text of {len(value)} characters; {MAX_TEXT} are the most")
    if isinstance(value, int) and abs(value) > MAX_WHOLE_NUMBER:
        raise CustomLossInvalid(f"node {node!r} has a whole number beyond {MAX_WHOLE_NUMBER}")
    if isinstance(value, float) and not math.isfinite(value):
        raise CustomLossInvalid(f'node {node!r} has a number that is not finite; it is written {{"float": "inf"}}')
    return value


def _joined(node: str, kind: str, entries: list[Argument]) -> Argument:
    if kind == "tuple":
        return tuple(entries)
    if len(entries) != 3:
        raise CustomLossInvalid(f"node {node!r} has a slice of {len(entries)} parts; it has three")
    return slice(*entries)


def _named(node: str, kind: str, name: str) -> Named:
    if len(name) > MAX_TEXT or (kind in _KNOWN_NAMES and name not in _KNOWN_NAMES[kind]):
        raise CustomLossInvalid(f"node {node!r} names the {kind} {name[:MAX_TEXT]!r}, which this server does not know")
    return Named(cast("Any", kind), name)
