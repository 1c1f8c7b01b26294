"""A model of the cost of training steps on a GPU, computed on a CPU from the engine's real operations.

The engine's own code runs on fake tensors, which have shapes and no memory, on the path that it takes on a GPU. Each
operation that launches a kernel costs the largest of three times: its floating-point operations at the GPU's rate, its
bytes at the memory's rate, and the time of a launch. The floor is the time of the matrix products alone. All layers of
a model are equal, so the costs of two shallow models give those of a deep one.

The figures are a lower bound of the time: a kernel rarely reaches the rates of its device. On an H200 the kernels of
8 x 512 took 1.09 times as long as computed. Kernels of PyTorch and Liger for norms, losses and packed attention are
stood in for by operations that move as many bytes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, cast, get_args
from unittest import mock

import gpu_step
import numpy as np
import torch
from gpu_step import LONGEST_TOKENS
from rich.console import Console
from rich.table import Table
from tinsmith_trainer.engines.base import Datum, LoraProducts, LoraSpec, LossSpec, Work
from tinsmith_trainer.engines.peft import PeftEngine, engine, logprobs, shared_forward
from tinsmith_trainer.engines.peft.adapter import Adapter
from tinsmith_trainer.engines.peft.settings import (
    activations_room,
    device_settings,
    plan_for_room,
    weight_bytes,
)
from tinsmith_trainer.engines.peft.share_losses import ShareResult
from tinsmith_trainer.process.output import configure_logs
from tinsmith_trainer.torch_model import expert_products, norms, packing, products
from tinsmith_trainer.torch_model.lora import StackedLoraLinear
from tinsmith_trainer.torch_model.norms import fuse_norms
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import Node
from torch.nn.utils import clip_grad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel, Qwen3Config
from typing_extensions import override
from workloads import ALPHA, RANK

MS = 1e-3


@dataclass(frozen=True, slots=True)
class Gpu:
    """The memory and the rates of a GPU, and the time of an operation in the process that drives it."""

    memory_bytes: int
    flops_per_second: float
    float32_flops_per_second: float
    bytes_per_second: float
    launch_seconds: float
    host_operation_seconds: float


# The rates that large kernels reach. float32 has no tensor cores without TF32. A launch takes this long on the device,
# and an operation this long in Python and PyTorch's dispatcher. Later changes of the engine are compared by these
# figures, so they stay as they are.
GPUS = {"h100": Gpu(80 * 2**30, 790e12, 50e12, 3.0e12, 2.5e-6, 6.5e-6)}


@dataclass(frozen=True, slots=True)
class Cost:
    """The kernels of some operations: launches, seconds on the GPU, bytes moved, and bytes of float32 among them."""

    launches: float = 0.0
    seconds: float = 0.0
    moved_bytes: float = 0.0
    float32_bytes: float = 0.0

    def plus(self, other: Cost, times: float = 1.0) -> Cost:
        return Cost(
            self.launches + times * other.launches,
            self.seconds + times * other.seconds,
            self.moved_bytes + times * other.moved_bytes,
            self.float32_bytes + times * other.float32_bytes,
        )


Costs = dict[str, Cost]
"""Costs by item: the part of the model that needs them."""

# The order of the report.
ATTENTION, FROZEN, ADAPTERS, NORMS, LOSS, OTHER, OPTIMIZER = (
    "attention",
    "frozen products",
    "adapter products",
    "norms",
    "logits and loss",
    "rotary angles, activations, residuals",
    "optimizer",
)
ITEMS = (FROZEN, ADAPTERS, NORMS, OTHER, ATTENTION, LOSS, OPTIMIZER)


def added(costs: Sequence[Costs], times: Sequence[float] | None = None) -> Costs:
    total: Costs = {}
    for each, factor in zip(costs, times or [1.0] * len(costs), strict=True):
        for item, cost in each.items():
            total[item] = total.get(item, Cost()).plus(cost, factor)
    return total


def total_of(costs: Costs) -> Cost:
    total = Cost()
    for cost in costs.values():
        total = total.plus(cost)
    return total


class PricedOperations(TorchDispatchMode):
    """Prices every operation in a block, by the item of the module that computes it.

    In backward the item is that of the autograd node, which `Labels` has set.
    """

    def __init__(self, gpu: Gpu, labels: Labels) -> None:
        super().__init__()
        self._gpu = gpu
        self._labels = labels
        self.costs: Costs = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves(_read(func, args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(_written(func, args, out)) if isinstance(leaf, Tensor)]
        if written and launches_kernel(func):
            flops = _flops(func, args, kwargs or {}, out)
            item = self._labels.current(func._schema.name, is_narrow=_is_narrow(read))
            self.costs[item] = self.costs.get(item, Cost()).plus(_priced(self._gpu, flops, read, written))
        return out


def _read(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Return what an operation reads. Zeros only take a shape, and a copy does not read its target."""
    name = func._schema.name
    if name.startswith(("aten::zeros", "aten::new_zeros")):
        return ()
    return args[1] if name == "aten::copy_" else (args, kwargs)


def _written(func: Any, args: Sequence[Any], out: Any) -> Any:
    """Return what an operation writes. Operations on lists of tensors in place return nothing."""
    name = func._schema.name
    return args[0] if name.startswith("aten::_foreach_") and name.endswith("_") else out


def _is_narrow(operands: Sequence[Tensor]) -> bool:
    """Return whether a product has a side of an adapter's rank."""
    return RANK in {size for operand in operands for size in operand.shape}


WITHOUT_KERNELS = (
    *("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::lift_fresh", "aten::detach"),
    "aten::_reshape_alias",
)


def launches_kernel(func: Any) -> bool:
    name = func._schema.name
    return not func.is_view and not name.startswith(WITHOUT_KERNELS)


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    name = func._schema.name.partition("::")[2].removesuffix("_")  # an operation in place counts as the other
    count = flop_registry.get(getattr(torch.ops.aten, name, None))
    return 0 if count is None else count(*args, **kwargs, out_val=out)


def _priced(gpu: Gpu, flops: int, read: Sequence[Tensor], written: Sequence[Tensor]) -> Cost:
    tensors = [*read, *written]
    moved = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
    float32 = sum(tensor.numel() * tensor.itemsize for tensor in tensors if tensor.dtype == torch.float32)
    is_wide = written[0].dtype == torch.float32
    rate = gpu.float32_flops_per_second if is_wide else gpu.flops_per_second
    seconds = max(flops / rate, moved / gpu.bytes_per_second, gpu.launch_seconds)
    return Cost(1, seconds, moved, float32)


PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm")


@dataclass(slots=True)
class Labels:
    """The item of each module of a model, of its operations in forward, and of their autograd nodes."""

    model: PreTrainedModel
    _stack: list[str] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.model.modules():
                if (item := _item_of(module)) is not None:
                    self._watch(module, item, stack)
            yield

    def _watch(self, module: nn.Module, item: str, stack: ExitStack) -> None:
        def enter(*_: object) -> None:
            self._stack.append(item)

        def leave(_: nn.Module, inputs: object, out: object) -> None:
            self._stack.pop()
            for tensor in tree_leaves(out):
                if isinstance(tensor, Tensor):
                    _label(tensor.grad_fn, item)

        for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
            stack.callback(handle.remove)

    def current(self, operation: str, *, is_narrow: bool) -> str:
        """Return the item of the operation that runs. An operation outside of all modules belongs to the loss."""
        if "scaled_dot_product" in operation:
            return ATTENTION
        node = torch._C._current_autograd_node()
        item = self._stack[-1] if self._stack else LOSS if node is None else _label_of(node) or LOSS
        return FROZEN if item == ADAPTERS and operation in PRODUCTS and not is_narrow else item


def _item_of(module: nn.Module) -> str | None:
    """Return the item of a module whose own operations launch kernels, or None."""
    if isinstance(module, StackedLoraLinear):
        return ADAPTERS
    if "Norm" in type(module).__name__:
        return NORMS
    return OTHER if type(module).__name__.endswith(("Attention", "MLP", "DecoderLayer", "Model")) else None


def _label(node: Node | None, item: str) -> None:
    """Label a node and those before it which have no label: inner modules have labelled theirs."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each is not None and _label_of(each) is None:
            _metadata(each)["item"] = item
            waiting += [before for before, _ in each.next_functions]


def _label_of(node: Node) -> str | None:
    return cast("str | None", _metadata(node).get("item"))


def _metadata(node: Node) -> dict[str, object]:
    return cast("dict[str, object]", node.metadata)  # PyTorch declares it as a method, and it is a property


# Numbers of layers from which those of a deep model follow.
DEPTHS = (1, 2)


@dataclass(frozen=True, slots=True)
class Workload:
    """The datums of each adapter in one step, by their lengths in tokens."""

    name: str
    lengths: Sequence[int]
    adapters: int = 1

    @property
    def tokens(self) -> int:
        return self.adapters * sum(self.lengths)


def ragged(count: int, below: int) -> list[int]:
    """Draw lengths of 64 tokens or more."""
    return [int(length) for length in np.random.default_rng(0).integers(64, below, count)]


WORKLOADS: Mapping[str, Sequence[Workload]] = {
    "steps": (
        Workload("8 x 512", [512] * 8),
        Workload("64 ragged of 64 to 1,023", ragged(64, 1024)),
        Workload("64 ragged of 64 to 255", ragged(64, 256)),
        Workload("8 ragged of 64 to 255", ragged(8, 256)),
        Workload("8 adapters, each 8 ragged of 64 to 255", ragged(8, 256), adapters=8),
    ),
    "adapters": (
        Workload("64 x 64", [64] * 64),
        Workload("64 adapters, each 64", [64], adapters=64),
        Workload("256 x 64", [64] * 256),
        Workload("256 adapters, each 64", [64], adapters=256),
    ),
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """The cost of one step without its optimizer, or of one optimizer step.

    `floor_seconds` are those of the matrix products alone, and `host_seconds` those in which Python launches kernels.
    The step takes the longer of `gpu_seconds` and `host_seconds`.
    """

    name: str
    tokens: int
    forwards: int
    floor_seconds: float
    gpu_seconds: float
    host_seconds: float
    launches: int
    float32_bytes: float
    seconds_by_item: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return max(self.gpu_seconds, self.host_seconds)


class GpuModel:
    """The engine's costs for one shape of Qwen3, with random weights in bfloat16 that are never made."""

    def __init__(self, shape: str, gpu: Gpu, lora_products: LoraProducts | None) -> None:
        self._gpu = gpu
        self._shape = gpu_step.SHAPES[shape]
        whole = gpu_step.new_model(shape, torch.device("meta"), torch.bfloat16)
        room = activations_room(gpu.memory_bytes, weight_bytes(whole))
        plan = plan_for_room(room, whole.config, torch.bfloat16.itemsize, None, "auto")
        self._flops_per_token = gpu_step.flops_per_token(whole)
        defaults = device_settings("cuda", torch.bfloat16, plan)
        most = max(workload.adapters for workload in chain(*WORKLOADS.values()))
        self._settings = replace(defaults, lora_products=lora_products or defaults.lora_products, adapter_slots=most)

    def step(self, workload: Workload) -> Estimate:
        """Return the estimate of forward and backward of one call for each adapter."""
        forwards = 0

        def compute(shallow: PeftEngine) -> None:
            nonlocal forwards
            forwards = compute_calls(shallow, calls_of(workload, np.zeros))

        costs = self._costs(compute, workload.adapters)
        floor = workload.tokens * self._flops_per_token / self._gpu.flops_per_second
        return self._estimate(workload.name, workload.tokens, forwards, floor, costs)

    def optimizer_step(self) -> Estimate:
        """Return the estimate of AdamW and of the gradient's norm, for one adapter. It has no products."""

        def step(shallow: PeftEngine) -> None:
            shallow.optim_step(adapter_name(0), gpu_step.ADAM)

        costs = self._costs(step, 1)
        return self._estimate("AdamW and norm of one adapter", 0, 0, 0.0, {OPTIMIZER: total_of(costs)})

    def _estimate(self, name: str, tokens: int, forwards: int, floor: float, costs: Costs) -> Estimate:
        total = total_of(costs)
        return Estimate(
            name=name,
            tokens=tokens,
            forwards=forwards,
            floor_seconds=floor,
            gpu_seconds=total.seconds,
            host_seconds=total.launches * self._gpu.host_operation_seconds,
            launches=round(total.launches),
            float32_bytes=total.float32_bytes,
            seconds_by_item={item: costs[item].seconds for item in ITEMS if item in costs},
        )

    def _costs(self, work: Callable[[PeftEngine], None], adapters: int) -> Costs:
        fewer, more = (self._costs_at_depth(depth, work, adapters) for depth in DEPTHS)
        layers = int(self._shape["num_hidden_layers"])
        return added([fewer, more, fewer], [1.0, layers - DEPTHS[0], DEPTHS[0] - layers])

    def _costs_at_depth(self, layers: int, work: Callable[[PeftEngine], None], adapters: int) -> Costs:
        config = Qwen3Config(**self._shape | {"num_hidden_layers": layers}, max_position_embeddings=LONGEST_TOKENS)
        with on_a_gpu():
            model = gpu_step.model_of(config, torch.device("cpu"), torch.bfloat16)
            fuse_norms(model)
            loaded = gpu_step.torch_model("fake", model)
            shallow = PeftEngine(loaded, self._settings)
            for number in range(adapters):
                shallow.create_adapter(adapter_name(number), LoraSpec(RANK, ALPHA, seed=number))
            labels = Labels(model)
            with labels.watched(), PricedOperations(self._gpu, labels) as priced:
                work(shallow)
        return priced.costs


def adapter_name(number: int) -> str:
    return f"adapter-{number}"


def calls_of(workload: Workload, tokens: Callable[[int], np.ndarray]) -> Sequence[Work]:
    """Return one call for each adapter. `tokens` returns as many tokens as asked for."""

    def datum(length: int) -> Datum:
        return Datum(tokens(length).astype(np.int32), {"target_tokens": tokens(length).astype(np.int64)})

    return [
        Work(adapter_name(number), [datum(length) for length in workload.lengths], LossSpec("cross_entropy"))
        for number in range(workload.adapters)
    ]


def compute_calls(computing: PeftEngine, works: Sequence[Work]) -> int:
    """Compute calls that wait at the same time, as the scheduler does. Returns the number of forwards."""
    waiting = [computing.start(work) for work in works]
    forwards = 0
    while waiting:
        computing.advance(computing.cobatch(waiting))
        forwards += 1
        for call in [each for each in waiting if each.next_tokens == 0]:
            computing.finish(call)
            waiting.remove(call)
        waiting = [*waiting[1:], waiting[0]] if waiting else []
    return forwards


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Compute with fake tensors on the path of a GPU.

    The tensors are of a CPU, because backward of a GPU's tensors needs its driver. A value that is read from the device
    is 1, and arrays are zeros.
    """

    def item(_: Tensor) -> float:
        return 1.0

    with (
        mock.patch.object(engine, "check_architecture"),
        mock.patch.object(Adapter, "draw"),
        mock.patch.object(engine, "PACKED_BELOW_TOKENS", new=LONGEST_TOKENS + 1),
        mock.patch.object(engine, "packs_within_rounding", return_value=True),
        mock.patch.object(packing, "blocked_attention", new=packed_attention),
        mock.patch.object(expert_products, "takes_all_at_once", return_value=True),
        mock.patch.object(engine, "choose_loss_kernel", return_value="liger"),
        mock.patch.object(logprobs, "_losses_and_gradient", new=fused_losses),
        mock.patch.object(shared_forward, "_to_numpy", new=_zeros),
        mock.patch.object(products, "HAS_ONEDNN", new=False),
        mock.patch.object(gpu_step, "wrap_activations"),
        mock.patch.object(norms, "_agrees", return_value=True),
        mock.patch.object(norms.functional, "rms_norm", new=fused_norm),
        mock.patch.object(clip_grad, "_has_foreach_support", return_value=True),
        mock.patch.object(FakeTensor, "item", new=item),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


class _FusedNorm(torch.autograd.Function):
    """Operations that move as many bytes as a GPU's kernel for a norm, with one launch in each direction."""

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad + x


class _PackedAttention(torch.autograd.Function):
    """Operations that move as many bytes as attention by one kernel forward, and by two backward.

    The model leaves out the arithmetic of attention, which is a hundredth of a step for sequences of 512 tokens.
    """

    @staticmethod
    @override
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, value)
        return torch.cat([query, key, value], 1)[:, : query.shape[1]]

    @staticmethod
    @override
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = ctx.saved_tensors
        return grad + query, key.clone(), value.clone()


def packed_attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    attended: Tensor = _PackedAttention.apply(query, key, value)
    return attended


def fused_losses(logits: Tensor, targets: Tensor, *, trains: bool) -> tuple[Tensor, Tensor]:
    """Move as many bytes as Liger's kernel, which reads logits twice and overwrites them, in one launch."""
    del trains
    overwritten = logits.data  # a kernel's writes are unknown to autograd
    overwritten.add_(overwritten)
    return torch.zeros(targets.shape, device=logits.device), logits


def fused_norm(x: Tensor, *_: object) -> Tensor:
    normed: Tensor = _FusedNorm.apply(x)
    return normed


def _zeros(logprobs: Tensor, loss: Tensor, metrics: Mapping[str, Tensor]) -> ShareResult:
    return ShareResult(
        np.zeros(logprobs.shape, np.float32),
        np.zeros(loss.shape, np.float32),
        {name: np.zeros(values.shape, np.float32) for name, values in metrics.items()},
    )


def draw(estimates: Sequence[Estimate], title: str) -> Table:
    table = Table(
        title=title,
        caption="times in ms: of the products alone, on the GPU, and of the host's launches; the ratio is to the floor",
    )
    table.add_column("step")
    for heading in ("tokens", "forwards", "launches", "floor", "GPU", "host", "ratio", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in estimates:
        ratio = f"{each.seconds / each.floor_seconds:.1f}" if each.floor_seconds else ""
        rate = f"{each.tokens / each.seconds:,.0f}" if each.tokens else ""
        times = (f"{seconds / MS:,.1f}" for seconds in (each.floor_seconds, each.gpu_seconds, each.host_seconds))
        counts = (f"{each.tokens or '':,}" if each.tokens else "", f"{each.forwards or ''}", f"{each.launches:,}")
        table.add_row(each.name, *counts, *times, ratio, rate)
    return table


def draw_items(estimate: Estimate) -> Table:
    table = Table(title=f"{estimate.name}: the GPU's time by item")
    table.add_column("item")
    for heading in ("ms", "share"):
        table.add_column(heading, justify="right")
    for item, seconds in estimate.seconds_by_item.items():
        table.add_row(item, f"{seconds / MS:,.1f}", f"{seconds / estimate.gpu_seconds:.0%}")
    return table


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=gpu_step.SHAPES, default="8B", help="by its parameters")
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--lora-products", choices=get_args(LoraProducts), help="as the worker's")
    parser.add_argument(
        "--workloads", choices=WORKLOADS, default="steps", help="single calls, or calls of many adapters"
    )
    parser.add_argument("--only", default="", help="estimate the steps whose name contains this text")
    parser.add_argument("--json", action="store_true", help="print the estimates as JSON")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    configure_logs("console", "error")  # standard output is only for the figures
    model = GpuModel(options.model, GPUS[options.gpu], options.lora_products)
    chosen = [workload for workload in WORKLOADS[options.workloads] if options.only in workload.name]
    estimates = [*(model.step(workload) for workload in chosen), model.optimizer_step()]
    if options.json:
        print(json.dumps([asdict(each) for each in estimates], indent=2))
        return
    console = Console()
    console.print(draw(estimates, f"Qwen3-{options.model}'s shape on {options.gpu}, computed"))
    console.print(draw_items(estimates[0]))


if __name__ == "__main__":
    main()
