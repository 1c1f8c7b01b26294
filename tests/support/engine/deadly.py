"""The reference engine, with calls that end their process.

What ends it is in the request: a microbatch that begins with one of the tokens below, a seed, a learning rate. Where
`TINSMITH_TEST_DEADLY` names a folder, what a file in it names ends the process, too, until the file is gone. While one
is called `hangs`, calls hang; while one is called `bad-disk`, no file is kept that has its text in the path.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from support.engine.reference import ReferenceCall, ReferenceEngine
from tinsmith_rpc import wire_pb2
from tinsmith_trainer.engines.base import AdamParams, AdapterState, Call, LoraSpec, Work
from tinsmith_trainer.errors import UserError
from tinsmith_trainer.process.exit import end_process
from typing_extensions import override

FOLDER_VARIABLE = "TINSMITH_TEST_DEADLY"
KILLS, ENDS, EXITS = 31, 30, 29
"""First tokens: killed as for want of memory; ended with a sign, as where a rank is lost; left by SystemExit."""
HANGS, HUNG = "hangs", "hung"
"""The second appears when a call has begun to hang."""
SLOW_IMPORT, IMPORTING = "slow-import", "importing"
"""The files of a gate.

While the first exists, an import waits; the second appears when the import has begun to wait.
"""
BAD_DISK = "bad-disk"
REFUSED = 28
"""A first token: the engine refuses the call, and it kills to read that body once more."""
HARMLESS_TOKENS = min(KILLS, ENDS, EXITS, REFUSED)
"""First tokens below this one are trained on as any other."""
DEADLY_SEED = 13
DEADLY_RATE = 13.0

_fsync = os.fsync


class DeadlyEngine(ReferenceEngine):
    @override
    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        super().create_adapter(adapter_id, lora)
        _die(lora.seed == DEADLY_SEED)

    @override
    def start(self, work: Work) -> ReferenceCall:
        if REFUSED in (int(datum.tokens[0]) for datum in work.datums):
            _Request.refused = _Request.latest
            raise UserError("the engine refuses the call")
        return super().start(work)

    @override
    def advance(self, calls: Sequence[Call]) -> None:
        firsts = [int(call.microbatch[0].tokens[0]) for call in cast("Sequence[ReferenceCall]", calls)]
        _die(KILLS in firsts or any(_is_deadly(f"forward_backward-{first}") for first in firsts))
        while _is_deadly(HANGS):
            Path(os.environ[FOLDER_VARIABLE], HUNG).touch()
            time.sleep(0.01)
        if ENDS in firsts:
            _end_with_a_sign()
        if EXITS in firsts:
            raise SystemExit(1)
        super().advance(calls)

    @override
    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        metrics = super().optim_step(adapter_id, params)
        _die(params.learning_rate == DEADLY_RATE)
        return metrics

    @override
    def adapter_shapes(self, lora: LoraSpec) -> dict[str, tuple[int, ...]]:
        """Asked while an adapter's files are read."""
        while _is_deadly(SLOW_IMPORT):
            Path(os.environ[FOLDER_VARIABLE], IMPORTING).touch()
            time.sleep(0.01)
        _die(_is_deadly("import"))
        return super().adapter_shapes(lora)

    @override
    def state(self, adapter_id: str) -> AdapterState:
        _die(_is_deadly("state"))
        return super().state(adapter_id)

    @override
    def load_state(self, adapter_id: str, state: AdapterState, with_optimizer: bool) -> None:
        _die(_is_deadly(f"load_state-{adapter_id}"))
        super().load_state(adapter_id, state, with_optimizer)


class _Request:
    """A request whose message ends the process when it is parsed after it was refused."""

    latest, refused = b"", b"nothing"
    _message_type = wire_pb2.ForwardBackwardRequest

    def __init__(self) -> None:
        self._message = self._message_type()

    def ParseFromString(self, content: bytes) -> None:
        _die(content == self.refused)
        _Request.latest = content
        self._message.ParseFromString(content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._message, name)


def build_deadly(options: Any) -> tuple[DeadlyEngine, None]:
    os.fsync = _fail_at_bad_places
    wire_pb2.ForwardBackwardRequest = _Request  # type: ignore[misc, assignment]
    return DeadlyEngine(options.model, options.adapter_slots, min(options.max_rank, 16)), None


def _die(now: bool) -> None:
    if now:
        os.kill(os.getpid(), signal.SIGKILL)


def _is_deadly(name: str) -> bool:
    folder = os.environ.get(FOLDER_VARIABLE)
    return folder is not None and (Path(folder) / name).exists()


def _end_with_a_sign() -> None:
    try:
        raise RuntimeError("rank 1\nof 2 has no memory left")
    except RuntimeError:
        end_process("the ranks of the model are lost")


def _fail_at_bad_places(descriptor: int) -> None:
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if _is_deadly(BAD_DISK) and Path(os.environ[FOLDER_VARIABLE], BAD_DISK).read_text() in path:
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)
    _fsync(descriptor)
