"""Megatron's own layers, schedules and optimizers on a machine without a GPU.

Megatron names the device "cuda" in many places and asks it for its number, its streams and its random states. Inside
`cpu_megatron()` those questions are answered for the CPU, for the calling thread alone; outside, torch and Megatron are
as they were.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from tinsmith_trainer.errors import ServerError

with warnings.catch_warnings():
    # At its first import Megatron warns of what it would have on a GPU: Apex and TransformerEngine.
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
    from megatron.core import __version__ as installed_version
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

# A router asks for it without TransformerEngine too, whose import would have set it.
vars(moe_utils).setdefault("te_general_gemm", None)

WRITTEN_FOR = "0.16."
CPU = torch.device("cpu")

_Answer = Callable[..., Any]


class _Here(threading.local):
    """Whether this thread is inside, how deep."""

    depth = 0


_here = _Here()
_lock = threading.Lock()
_threads_inside = 0
_originals: dict[tuple[object, str], _Answer] = {}


@contextmanager
def cpu_megatron() -> Iterator[None]:
    """All of Megatron runs inside where there is no CUDA; where there is, this does nothing.

    Raises ServerError for a Megatron whose questions are not known here. May be entered again inside.
    """
    if torch.cuda.is_available() or _here.depth > 0:
        yield
        return
    _check_version()
    _here.depth += 1
    _answer_for_cpu()
    # A class attribute, set once; None has it made, which needs a GPU.
    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NO_STREAM
    try:
        with _OnCpu():
            yield
    finally:
        _answer_as_before()
        _here.depth -= 1


def _check_version() -> None:
    if not installed_version.startswith(WRITTEN_FOR):
        raise ServerError(
            f"Ranks on the CPU need megatron-core {WRITTEN_FOR}x, and {installed_version} is installed: what it asks "
            f"of a GPU may differ. Install megatron-core {WRITTEN_FOR}x, or run on GPUs."
        )


class _NoStream:
    """In the place of a stream and of its events: what is asked for is there."""

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        """There is nothing to wait for."""


_NO_STREAM = _NoStream()


class _OnCpu(TorchFunctionMode):
    """Takes "cuda" for the CPU in what this thread calls, and tells types as Megatron's checks want them."""

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if _is_cuda(named.get("device")):
            named["device"] = CPU
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to and any(_is_cuda(argument) for argument in args[1:]):
            args = tuple(CPU if _is_cuda(argument) else argument for argument in args)
        answer = func(*args, **named)
        if func is Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def _is_cuda(device: object) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _current_device() -> torch.device:
    return CPU


def _nothing(*_: Any, **__: Any) -> None:
    """There is nothing to wait for."""


def _no_random_states(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Nothing is drawn: dropout is 0, and weights come from files."""
    return nullcontext()


def _no_random_state(*_: Any, **__: Any) -> Tensor:
    """What a layer is computed again with."""
    return torch.empty(0, dtype=torch.uint8)


def _no_stream(*_: Any, **__: Any) -> _NoStream:
    return _NO_STREAM


def _as_counts(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """How many tokens go to whom: Megatron turns them to numbers where it moves them off a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


_STAND_INS: Mapping[tuple[object, str], _Answer] = {
    (torch.cuda, "current_device"): _current_device,
    (torch.cuda, "synchronize"): _nothing,
    (CudaRNGStatesTracker, "fork"): _no_random_states,
    (torch.cuda, "current_stream"): _no_stream,
    (torch.cuda, "stream"): _no_random_states,
    (token_dispatcher, "maybe_move_tensor_to_cpu"): _as_counts,
    (random, "_get_cuda_rng_state"): _no_random_state,
    (random, "_set_cuda_rng_state"): _nothing,
}


def _answer_for_cpu() -> None:
    global _threads_inside  # noqa: PLW0603
    with _lock:
        if _threads_inside == 0:
            for (owner, name), stand_in in _STAND_INS.items():
                original = getattr(owner, name)
                _originals[owner, name] = original
                setattr(owner, name, _inside_only(stand_in, original))
        _threads_inside += 1


def _answer_as_before() -> None:
    global _threads_inside  # noqa: PLW0603
    with _lock:
        _threads_inside -= 1
        if _threads_inside == 0:
            for (owner, name), original in _originals.items():
                setattr(owner, name, original)
            _originals.clear()


def _inside_only(stand_in: _Answer, original: _Answer) -> _Answer:
    """Other threads, a sampler's say, keep asking the real thing."""

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if _here.depth > 0 else original)(*args, **kwargs)

    return answer
