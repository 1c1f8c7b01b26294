"""Megatron's own layers, schedules and optimizers on a machine without a GPU.

Megatron names the device "cuda" in many places, and queries the index, streams and random states of this device. Inside
`cpu_megatron()`, Megatron's queries about a GPU get answers for the CPU. Other threads, and code outside the context,
use torch and Megatron unchanged.
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


@contextmanager
def _uncompiled_without_gpu() -> Iterator[None]:
    """Leave functions uncompiled that are decorated with `torch.compile`, on a machine without a GPU.

    The decorator imports PyTorch's compiler, which takes 1.5 s. The model calls none of Megatron's compiled functions.
    """
    compiling = torch.compile
    if not torch.cuda.is_available():
        setattr(torch, "compile", _unchanged)  # noqa: B010 - mypy knows the type of the function
    try:
        yield
    finally:
        setattr(torch, "compile", compiling)  # noqa: B010


def _unchanged(function: Any = None, **_: Any) -> Any:
    """Return the function itself, as a decorator with or without arguments."""
    return _unchanged if function is None else function


with warnings.catch_warnings(), _uncompiled_without_gpu():
    # At import Megatron warns of missing GPU packages: Apex and TransformerEngine.
    warnings.simplefilter("ignore")
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.optimizer  # noqa: F401
    from megatron.core import __version__ as installed_version
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

# A router reads it even without TransformerEngine, whose import sets it.
vars(moe_utils).setdefault("te_general_gemm", None)

WRITTEN_FOR = "0.16."
CPU = torch.device("cpu")

_Answer = Callable[..., Any]


class _Here(threading.local):
    """The nesting depth of `cpu_megatron` in this thread."""

    depth = 0


_here = _Here()
_lock = threading.Lock()
_threads_inside = 0
_originals: dict[tuple[object, str], _Answer] = {}


@contextmanager
def cpu_megatron() -> Iterator[None]:
    """Run Megatron without CUDA inside this context. On a machine with CUDA, the context does nothing.

    Raises ServerError for an unknown version of Megatron. Contexts may be nested.
    """
    if torch.cuda.is_available() or _here.depth > 0:
        yield
        return
    _check_version()
    _here.depth += 1
    _answer_for_cpu()
    # A class attribute that is set once. If it is None, a stream is created, which needs a GPU.
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
            f"Ranks on the CPU need megatron-core {WRITTEN_FOR}x, but {installed_version} is installed, whose use of "
            f"a GPU may differ. Install megatron-core {WRITTEN_FOR}x, or run on GPUs."
        )


class _NoStream:
    """A substitute for a CUDA stream and events of this stream; all work in this stream is always complete."""

    def record_event(self) -> _NoStream:
        return self

    def synchronize(self) -> None:
        """Return at once."""


_NO_STREAM = _NoStream()


class _OnCpu(TorchFunctionMode):
    """A mode that replaces the device "cuda" by the CPU in this thread's calls.

    The mode also reports tensor types in the form that Megatron expects.
    """

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
    """Return at once: a substitute for functions that have nothing to do on the CPU."""


def _no_random_states(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Do nothing: dropout is 0, and weights come from files."""
    return nullcontext()


def _no_random_state(*_: Any, **__: Any) -> Tensor:
    """Return an empty random state for recomputed layers."""
    return torch.empty(0, dtype=torch.uint8)


def _no_stream(*_: Any, **__: Any) -> _NoStream:
    return _NO_STREAM


def _as_counts(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Return counts as numbers, because Megatron converts counts only during a copy from a GPU."""
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
    """Replace a function inside the context only.

    Other threads, such as the thread of a sampler, use the original function.
    """

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if _here.depth > 0 else original)(*args, **kwargs)

    return answer
