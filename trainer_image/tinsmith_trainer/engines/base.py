"""The interface between the scheduler and an engine: a few operations on adapters over one base model.

Tensors cross it as numpy arrays, so that journal, scheduler and snapshots depend on no framework.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.torch_model.base_model import BaseModelInfo, Image

ExportLayout = Literal["peft", "merged"]
Numerics = Literal["exact", "fast"]
"""Whether results are promised bit for bit.

`exact`: equal calls have equal bits, so a replay gives the same weights. `fast`: a replay is the same function with
sums in another order."""
LoraProducts = Literal["float32", "tf32", "bfloat16"]
LossKernel = Literal["auto", "torch", "liger"]
Recompute = Literal["auto", "none", "layers"]


@dataclass(frozen=True, slots=True)
class Datum:
    """Input tokens and the per-token inputs of the loss.

    `tokens` is int32 `[T]`. Loss inputs are dense: `target_tokens` is int64 `[T]` or `[T, K]`, and all others are
    float32 or int64, of the shape of `target_tokens` or `[T]`. Inputs of a custom loss may have other shapes than
    `target_tokens`.

    If the datum has images, `tokens` contains only text tokens until an engine inserts its model's image tokens.
    Per-token inputs have a value for each text token and each image token.
    """

    tokens: NDArray[np.int32]
    loss_inputs: Mapping[str, NDArray[np.int64] | NDArray[np.float32]] = field(default_factory=dict)
    images: tuple[Image, ...] = ()

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """An adapter's shape. `seed` always has a value.

    If the request has no seed, a seed is drawn and journaled before the adapter is created.
    """

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AnnouncedAdapter:
    """The announced rank of an adapter's files, and the module families that the files may contain.

    `seed` initializes the modules that the files leave out.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def allows(self, family: str) -> bool:
        return bool(getattr(self, f"train_{family}"))


@dataclass(frozen=True, slots=True)
class AdamParams:
    """The hyperparameters of one AdamW step with decoupled decay. A `grad_clip_norm` of 0 disables clipping."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name, with the call's config: numbers and strings, unchanged from the client."""

    name: str
    config: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """A forward_backward or forward call on one adapter."""

    adapter_id: str
    datums: Sequence[Datum]
    loss: LossSpec
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a Work: `outputs` holds one mapping per datum, in order.

    `outputs[i]["logprobs"]` is float32 of the shape of `target_tokens`. Keys of `metrics` are `name:reduction`.
    `input_tokens` counts the tokens of all datums, including images, also for a call that trained nothing.
    """

    outputs: Sequence[Mapping[str, NDArray[np.float32]]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    trained_tokens: int = 0
    input_tokens: int = 0


class Call(Protocol):
    """A Work in progress on the engine that started it. A call that is dropped before `finish` has no effect."""

    @property
    def next_tokens(self) -> int:
        """The tokens of the next microbatch, including padding. It is 0 if the call is ready for `finish`."""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The complete state of an adapter, which a snapshot stores exactly.

    Tensor names are `weights/<module>.lora_A`, `weights/<module>.lora_B` (`[rank, d_in]`, `[d_out, rank]`),
    `adam/exp_avg/<…>`, `adam/exp_avg_sq/<…>` and `gradients/<…>`; all are float32. A group may be absent: there are no
    gradients directly after a step, and no moments before the first step.
    """

    lora: LoraSpec
    optimizer_step: int
    tensors: Mapping[str, NDArray[np.float32]]

    def weights_only(self) -> AdapterState:
        """Return the state without moments and gradients, which is enough for sampling."""
        weights = {name: tensor for name, tensor in self.tensors.items() if name.startswith("weights/")}
        return AdapterState(self.lora, 0, weights)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """The features and limits of an engine.

    `divides_calls`: calls are split into microbatches, and other calls may run in between. `images`: datums may have
    images. `numerics` is None for a sampler, which replays nothing.
    """

    engine: str
    losses: tuple[str, ...]
    max_rank: int
    adapter_slots: int
    batch_invariant: bool
    numerics: Numerics | None = "exact"
    divides_calls: bool = True
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    images: bool = False


class CallRunner(Protocol):
    """The computation of Works, one microbatch at a time. The scheduler can so alternate between calls.

    Other calls may run between a call's microbatches, or in the same forward. They do not change the bits of its
    Outcome and gradients. Any number of calls may be in progress, even several on one adapter. While a call is in
    progress, nothing changes its adapter, except the `finish` of another call.
    """

    def start(self, work: Work) -> Call:
        """Check the work and plan its microbatches without computing anything. Raises TrainerError."""

    def cobatch_room(self, call: Call) -> int:
        """Return how many tokens of other calls the next forward of an unfinished call could include.

        If it returns 0, the call runs alone.
        """

    def cobatch(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Return the first of the unfinished calls, and the other calls whose next microbatch can share its forward."""

    def advance(self, calls: Sequence[Call]) -> None:
        """Compute the next microbatch of each call in one forward. The calls are those that `cobatch` returned.

        A failure belongs to one call: this call has nothing left to compute, and its `finish` raises the error.
        """

    def finish(self, call: Call) -> Outcome:
        """Add the call's gradients to the accumulator. If it raises TrainerError, the adapter is unchanged."""

    def clock_seconds(self) -> float:
        """Return the reading of a clock that stands still while the engine waits for its device."""
        return time.perf_counter()


class Engine(CallRunner, Protocol):
    """A backend, called from one thread at a time. An operation that raises a TrainerError changes no adapter."""

    def base_model(self) -> BaseModelInfo: ...

    def capabilities(self) -> EngineCapabilities: ...

    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        """Create an adapter. A is drawn from the seed in PEFT's way, B is zero, and the optimizer has no state."""

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        """Clip the gradient, step AdamW and clear the accumulator.

        Metrics include `grad_norm`, before clipping, and `step`, which counts this step, too.

        An empty accumulator counts as a zero gradient, and the step number still advances. A non-finite gradient norm
        raises UserError; then only the accumulator is cleared.
        """

    def clear_gradients(self, adapter_id: str) -> None:
        """Drop the gradients accumulated since the last step. Weights, moments and step are unchanged."""

    def state(self, adapter_id: str) -> AdapterState:
        """Return a copy that later calls do not change."""

    def weights(self, adapter_id: str) -> AdapterState:
        """Return the state without moments and gradients. Engines override this if they can avoid copying them."""
        state = self.state(adapter_id)
        return AdapterState(state.lora, state.optimizer_step, state.weights_only().tensors)

    def load_state(self, adapter_id: str, state: AdapterState, with_optimizer: bool) -> None:
        """Set an adapter's state. If the adapter does not exist, create it, even beyond the limits on slots and rank.

        The limits apply to new adapters only: a restored adapter may be older than a lowered limit. Gradients are
        restored only `with_optimizer` (a snapshot); a checkpoint has no gradients. Without the optimizer, moments and
        step start from zero.
        """

    def export(self, state: AdapterState, target: Path, layout: ExportLayout) -> None:
        """Write the adapter into the existing directory `target`, as files that PEFT or transformers can load."""

    def adapter_shapes(self, lora: LoraSpec) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the weights of an adapter with this spec, by `<module>.lora_A|B`.

        Callable from any thread. Raises UserError if this base model cannot have such an adapter.
        """

    def embedding_shapes(self) -> Sequence[tuple[int, ...]]:
        """Return the shapes of the base model's embeddings. PEFT may write copies of them next to an adapter.

        Callable from any thread.
        """

    def read_adapter(self, config: bytes, weights: bytes, announced: AnnouncedAdapter) -> AdapterState:
        """Read an adapter from untrusted files in `export`'s PEFT layout or a checkpoint's layout.

        Callable from any thread; no adapter of the engine changes. Raises UserError if the files are not an adapter of
        this base model.
        """

    def drop(self, adapter_id: str) -> None:
        """Free the adapter's slot. Unknown ids are ignored."""

    def close(self) -> None:
        """End the engine's other processes, if any. The engine is not used afterwards. Idempotent."""
        return
