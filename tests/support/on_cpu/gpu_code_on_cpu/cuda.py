"""PyTorch as it is asked for GPUs, on a machine that has none.

`torch.cuda.is_available()` stays False: what looks before it asks needs nothing of this.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
GPUS = 8
"""The number of GPUs of a node. Megatron-Bridge starts no NCCL where there are none."""
NOT_FOR_GLOO = ("device_id", "pg_options", "backend_options")
"""Arguments by which a process group of NCCL's knows its GPU."""


class _Here(str):
    """The CPU for PyTorch, and the number of the chosen GPU for code that compares or counts.

    In backward no mode is in force, and a number would be a GPU there.
    """

    def __new__(cls, gpu: int) -> Self:
        here = super().__new__(cls, CPU)
        here.gpu = gpu
        return here

    gpu: int

    def __eq__(self, other: object) -> bool:
        return other == self.gpu if isinstance(other, int) else super().__eq__(other)

    __hash__ = str.__hash__

    def __index__(self) -> int:
        return self.gpu

    __int__ = __index__


_device = _Here(0)


def answer_for_cpu() -> None:
    """Answer questions about GPUs for the CPU, in this process, until it ends."""
    _OnCpu().__enter__()
    _in_threads_to_come()
    vars(torch.cuda).update(_answers())
    _gloo_for_nccl()


class _OnCpu(TorchFunctionMode):
    """The mode in which a tensor for any GPU is made on the CPU.

    Types name the device that Megatron's optimizer checks for ("torch.cuda.FloatTensor").
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if _is_gpu(named.get("device")):
            named["device"] = CPU
        if named.get("pin_memory"):
            named["pin_memory"] = False
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is Tensor.to:
            args = (args[0], *(CPU if _is_gpu(argument) else argument for argument in args[1:]))
        answer = func(*args, **named)
        if func is Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


def _in_threads_to_come() -> None:
    """Enter the mode in threads that start later.

    Ray runs a worker's methods in another thread than the importing one.
    """
    run = threading.Thread.run

    def run_on_cpu(thread: threading.Thread) -> None:
        with _OnCpu():
            run(thread)

    threading.Thread.run = run_on_cpu


def _is_gpu(device: object) -> bool:
    """Return true for a GPU. A number means a GPU, too."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _set_device(device: int | str) -> None:
    global _device  # noqa: PLW0603
    _device = _Here(int(device.removeprefix("cuda:") if type(device) is str else device))


def _current_device() -> _Here:
    return _device


class _Stream:
    """A stream or an event. There is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def _nothing(*_: Any, **__: Any) -> None: ...


def _answers() -> dict[str, Any]:
    """Return the answers by the names of `torch.cuda`. Memory is that of an empty card."""
    gpu = SimpleNamespace(
        name="none: a CPU", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, uuid="none"
    )
    return {
        "set_device": _set_device,
        "current_device": _current_device,
        "device_count": lambda: GPUS,
        "get_device_properties": lambda *_, **__: gpu,
        "get_device_capability": lambda *_, **__: (gpu.major, gpu.minor),
        "get_device_name": lambda *_, **__: gpu.name,
        "memory_allocated": lambda *_, **__: 0,
        "memory_reserved": lambda *_, **__: 0,
        "max_memory_allocated": lambda *_, **__: 0,
        "mem_get_info": lambda *_, **__: (gpu.total_memory, gpu.total_memory),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda *_, **__: _Stream(),
        "current_stream": lambda *_, **__: _Stream(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_, **__: torch.empty(0, dtype=torch.uint8),
        "set_rng_state": _nothing,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
    }


def _gloo_for_nccl() -> None:
    """Use gloo, also where NCCL is asked for by name."""
    from torch import distributed
    from torch.distributed import distributed_c10d as module

    start, group, barrier = module.init_process_group, module.new_group, module.barrier

    def init_process_group(backend: str | None = None, *args: Any, **named: Any) -> Any:
        return start("gloo", *args, **_for_gloo(named))

    def new_group(ranks: Any = None, timeout: Any = None, backend: str | None = None, *_: Any, **named: Any) -> Any:
        return group(ranks, timeout, "gloo", **_for_gloo(named))

    def barrier_of_all(*args: Any, **named: Any) -> Any:
        return barrier(*args, **{name: value for name, value in named.items() if name != "device_ids"})

    replaced = {"init_process_group": init_process_group, "new_group": new_group, "barrier": barrier_of_all}
    for namespace in (distributed, module):
        vars(namespace).update(replaced)


def _for_gloo(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in NOT_FOR_GLOO}
