"""The IDs that clients see.

Each ID depends only on the client's request, and on the sampler that accepted it. So a repeated submission gets the
same request ID at every replica, unless another sampler accepts it.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import uuid
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from tinsmith_rpc import HIGHEST_CLIENT_SEQ_ID, PLAIN_SEQ_IDS, RELEASE_SEQ_ID, SAMPLES_OF_A_CLIENT
from tinsmith_rpc.custom_losses import is_loss_id
from typing_extensions import override

from tinsmith_server.errors import Unprocessable

PathKind = Literal["weights", "sampler_weights", "external_weights"]
CheckpointType = Literal["training", "sampler", "external"]

TYPE_OF_KIND: dict[PathKind, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
KIND_OF_TYPE: dict[str, PathKind] = {type_: kind for kind, type_ in TYPE_OF_KIND.items()}

MAX_NAME_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class OperationId:
    """The ID of a training operation.

    Number 0 is the model's creation, and RELEASE_SEQ_ID is the model's end. Numbers above PLAIN_SEQ_IDS belong to calls
    without a number.
    """

    model_id: str
    seq_id: int

    @override
    def __str__(self) -> str:
        return f"{self.model_id}:op:{self.seq_id}"


@dataclass(frozen=True, slots=True)
class SampleId:
    """The ID of an `asample` submission.

    The ID names the sampler that accepted the sample, so that every replica asks this sampler.

    If another sampler accepts a repeated submission, the result is another sample.
    """

    sampling_session_id: str
    seq_id: int
    sampler_token: str

    @override
    def __str__(self) -> str:
        return f"{self.sampling_session_id}:asample:{self.seq_id}@{self.sampler_token}"

    @property
    def client(self) -> int:
        """The number of the client in the sampling session. The first client has the number 0."""
        return self.seq_id // SAMPLES_OF_A_CLIENT

    def sequence_ids(self, count: int) -> tuple[str, ...]:
        """Return the IDs of the sequences. The sequence IDs do not depend on the sampler."""
        return tuple(f"{self.sampling_session_id}:asample:{self.seq_id}:{index}" for index in range(count))


@dataclass(frozen=True, slots=True)
class CustomLossId:
    """The ID of a custom loss in a session.

    `loss_id` contains the loss, so the future of the loss is stored nowhere.
    """

    session_id: str
    loss_id: str

    @override
    def __str__(self) -> str:
        return f"{self.session_id}:custom_loss:{self.loss_id}"


NUMBER_PATTERN = re.compile(r"0|[1-9][0-9]{0,18}")
TOKEN_PATTERN = re.compile(r"[0-9a-f]{8}")


@lru_cache(maxsize=1024)
def sampler_token(sampler_id: str) -> str:
    """Return the name of a sampler that is used in request IDs."""
    return hashlib.sha256(sampler_id.encode()).hexdigest()[:8]


def is_sample(request_id: str) -> bool:
    return isinstance(parse_request_id(request_id), SampleId)


def parse_request_id(text: str) -> OperationId | SampleId | CustomLossId | None:
    """Parse the text of an ID (the inverse of `str`). Return None for an ID that this server cannot have returned."""
    owner, _, rest = text.rpartition(":")
    owner, _, marker = owner.rpartition(":")
    number, at, token = rest.partition("@")
    if owner and marker == "custom_loss" and is_loss_id(rest):
        return CustomLossId(owner, rest)
    if not owner or not NUMBER_PATTERN.fullmatch(number):
        return None
    match marker:
        case "op" if not at and _is_in_an_id(int(number)):
            return OperationId(owner, int(number))
        case "asample" if TOKEN_PATTERN.fullmatch(token) and is_sample_number(int(number)):
            return SampleId(owner, int(number), token)
    return None


def _is_in_an_id(number: int) -> bool:
    return number == 0 or is_operation_number(number) or PLAIN_SEQ_IDS < number <= RELEASE_SEQ_ID


def is_operation_number(seq_id: object) -> bool:
    """Return whether a client can send the number with an operation."""
    return _is_integer(seq_id) and 1 <= seq_id <= HIGHEST_CLIENT_SEQ_ID  # type: ignore[operator]


def operation_number(seq_id: int) -> int:
    """Return the number if it is valid for an operation. Raises Unprocessable otherwise."""
    if not is_operation_number(seq_id):
        raise Unprocessable(f"seq_id must be a number from 1 to 2**60, not {seq_id}")
    return seq_id


def is_sample_number(seq_id: object) -> bool:
    """Return whether a sample can have the number.

    A sample's number needs 64 bits, because clones of a sampling client count from near 10**18.
    """
    return _is_integer(seq_id) and 0 <= seq_id < 2**63  # type: ignore[operator]


LAST_CLIENT = (2**63 - 1) // SAMPLES_OF_A_CLIENT
"""The highest number that a client can have.

Samples of a client with a higher number would need numbers of more than 64 bits.
"""


def is_client_counter(seq_id: object) -> bool:
    """Return whether the number is a valid client counter.

    `model_seq_id` and `sampling_session_seq_id` count from 0 in one program.
    """
    return _is_integer(seq_id) and 0 <= seq_id < 2**31  # type: ignore[operator]


def drawn_sample_number(key: str | None) -> int:
    """Return a number for a sample that has no number.

    The number comes from the idempotency key or is random, and is above the numbers of all clients.
    """
    bits = secrets.randbits(62) if key is None else int.from_bytes(hashlib.sha256(key.encode()).digest()) % 2**62
    return 2**62 + bits


OWN_SESSION = "rest-"


def own_session_id() -> str:
    """Return an ID for a session that was not created by a client.

    Every server can see from this ID that calls keep the session alive.
    """
    return f"{OWN_SESSION}{uuid.uuid4().hex}"


def is_own_session(session_id: str) -> bool:
    return session_id.startswith(OWN_SESSION)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def model_id_of(session_id: str, model_seq_id: int) -> str:
    """Return the ID of the model. For models made by `load_weights`, the SDK builds an ID of the same form itself."""
    return f"{session_id}:train:{model_seq_id}"


def sampling_session_id_of(session_id: str, seq_id: int, *, inflight: bool = False) -> str:
    """Return the ID of a sampling session. The ID includes the inflight flag.

    Clients must not interpret the ID. The worker's journal contains the ID, so the flag reaches the store through any
    replica that drains the worker's events.
    """
    return f"{session_id}:{'inflight' if inflight else 'sample'}:{seq_id}"


def session_of(owner_id: str) -> str:
    """Return the session of a model or a sampling session. For any other ID, return an empty text."""
    session_id, *rest = owner_id.rsplit(":", 2)
    return session_id if len(rest) == 2 else ""


@dataclass(frozen=True, slots=True)
class SamplingSessionName:
    """The parts of the ID of a sampling session."""

    session_id: str
    seq_id: int
    inflight: bool


def parse_sampling_session_id(text: str) -> SamplingSessionName:
    """Return the parts of the ID. Raises ValueError for an id that `sampling_session_id_of` did not make."""
    session_id, marker, number = text.rsplit(":", 2)
    if marker not in {"sample", "inflight"}:
        raise ValueError(f"{text!r} is not a sampling session's id")
    return SamplingSessionName(session_id, int(number), marker == "inflight")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    """A path `tinker://<run>/<kind>/<name>`, which has exactly three segments."""

    run_id: str
    kind: PathKind
    name: str

    @property
    def type(self) -> CheckpointType:
        return TYPE_OF_KIND[self.kind]

    @override
    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


# The SDK puts names into URLs without quoting. A request to delete `best#2` would delete `best`.
NOT_IN_NAMES = "/:?#%\\"


def parse_tinker_path(text: str) -> TinkerPath:
    """Return the parsed path. Raises ValueError with a message for the user."""
    segments = text.removeprefix("tinker://").split("/")
    if not text.startswith("tinker://") or len(segments) != 3 or not all(segments):
        raise ValueError(f"{text!r} is not a checkpoint path; one looks like tinker://<run>/weights/<name>")
    run_id, kind, name = segments
    for known in get_args(PathKind):
        if kind == known:
            return TinkerPath(run_id, known, name)
    raise ValueError(f"{text!r} has an unknown kind of checkpoint; the kinds are {', '.join(get_args(PathKind))}")


def check_name(name: str) -> str:
    """Return the name of a checkpoint, which becomes one segment of a path. Raises ValueError with a message."""
    if not name or len(name) > MAX_NAME_CHARACTERS:
        raise ValueError(f"a checkpoint name has 1 to {MAX_NAME_CHARACTERS} characters, this one has {len(name)}")
    if any(one in name for one in NOT_IN_NAMES) or not name.isprintable() or name in {".", ".."}:
        held = " ".join(NOT_IN_NAMES)
        raise ValueError(f"the checkpoint name {name!r} must not contain {held}, nor control characters")
    return name


# ---- checkpoint types that an SDK knows

VERSION_HEADER = "x-stainless-package-version"
ALL_TYPES: frozenset[CheckpointType] = frozenset(TYPE_OF_KIND.values())
FIRST_WITH_EXTERNAL = (0, 28)
"""The first SDK version that knows external checkpoints.

If an SDK does not know the type of one checkpoint, the SDK fails on the whole list.
"""
_VERSION = re.compile(r"(\d{1,6})\.(\d{1,6})(?!\d)")


def known_checkpoint_types(version: str | None) -> frozenset[CheckpointType]:
    """Return the types that this version of the SDK knows. Without a version, return all types."""
    found = _VERSION.match(version or "")
    if found and (int(found[1]), int(found[2])) < FIRST_WITH_EXTERNAL:
        return ALL_TYPES - {"external"}
    return ALL_TYPES
