"""What the scheduler asks of a backend: a few verbs over adapters on one base model.

Tensors cross this border as numpy arrays, so that journal, scheduler and snapshots
know no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.torch_model.base_model import BaseModelInfo, Image

ExportLayout = Literal["peft", "merged"]
LoraProducts = Literal["float32", "tf32", "bfloat16"]
LossKernel = Literal["auto", "torch", "liger"]
Recompute = Literal["auto", "none", "layers"]


@dataclass(frozen=True, slots=True)
class Datum:
    """Input tokens and the loss's per-token inputs.

    `tokens` is int32 `[T]`. Every loss input is dense: `target_tokens` int64 `[T]` or `[T, K]`,
    all others float32 or int64, of the same shape as `target_tokens` or `[T]`; a custom loss's may have another.

    Where there are images, `tokens` are those of the text alone until an engine has placed its model's own tokens for
    the images among them; what comes per token counts both.
    """

    tokens: NDArray[np.int32]
    loss_inputs: Mapping[str, NDArray[np.int64] | NDArray[np.float32]] = field(default_factory=dict)
    images: tuple[Image, ...] = ()

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """An adapter's shape. `seed` is always set here: a missing one was drawn and journalled before."""

    rank: int
    alpha: float
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AnnouncedAdapter:
    """What the sender of an adapter's files says of it: its rank, and the families that it may have parts in.

    `seed` draws the modules that the files leave out.
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
    """One step's hyperparameters: AdamW with decoupled decay; `grad_clip_norm` 0 is off."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class LossSpec:
    """A loss by name, with the call's config (numbers and texts as the client sent them)."""

    name: str
    config: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """What one forward_backward (or forward) is to compute, on one adapter."""

    adapter_id: str
    datums: Sequence[Datum]
    loss: LossSpec
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came out of a Work: outputs hold one mapping per datum, in order.

    `outputs[i]["logprobs"]` is float32 of `target_tokens`' shape. `metrics` keys are `name:reduction`.
    """

    outputs: Sequence[Mapping[str, NDArray[np.float32]]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    trained_tokens: int = 0
    input_tokens: int = 0  # of its datums, images included, also where nothing was trained


class Call(Protocol):
    """A Work under way, on the engine that started it. One that is dropped before its end leaves no trace."""

    @property
    def next_tokens(self) -> int:
        """What its next microbatch computes, padding included. 0: nothing is left, it is to be finished."""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """All of an adapter that a snapshot must hold, bit for bit.

    Tensor names are `weights/<module>.lora_A`, `weights/<module>.lora_B` (`[rank, d_in]`,
    `[d_out, rank]`), `adam/exp_avg/<…>`, `adam/exp_avg_sq/<…>`, `gradients/<…>`; all float32.
    A group may be absent: no gradients since the last step, no moments before the first.
    """

    lora: LoraSpec
    optimizer_step: int
    tensors: Mapping[str, NDArray[np.float32]]

    def weights_only(self) -> AdapterState:
        """What sampling needs: no moments, no gradients."""
        weights = {name: tensor for name, tensor in self.tensors.items() if name.startswith("weights/")}
        return AdapterState(self.lora, 0, weights)


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    engine: str
    losses: tuple[str, ...]
    max_rank: int
    adapter_slots: int
    batch_invariant: bool
    divides_calls: bool = True  # into microbatches, between which others get their turn
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    images: bool = False  # whether datums may have them


class Computer(Protocol):
    """How Works are computed: a microbatch at a time, so that whoever drives it can go from one call to another.

    An Outcome's bits, and those of the gradients, do not depend on what is computed between or beside a call's own
    microbatches. Any number of calls may be under way, several on one adapter, too; while they are, nothing but
    `finish` of another call may change their adapter.
    """

    def start(self, work: Work) -> Call:
        """Checks the work and plans its microbatches; computes nothing yet. Raises TrainerError."""

    def room_beside(self, call: Call) -> int:
        """Of a call with something left: tokens of others that its next forward could take. 0: it goes alone."""

    def together(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Of calls with something left: the first, and those whose next microbatch can share its forward."""

    def advance(self, calls: Sequence[Call]) -> None:
        """Computes the next microbatch of each, in one forward; `together` has chosen them.

        What goes wrong with one of them is its own: it has nothing left then, and `finish` raises it.
        """

    def finish(self, call: Call) -> Outcome:
        """Adds its gradients to the accumulator. Raises TrainerError, and then leaves the adapter as it was."""


class Engine(Computer, Protocol):
    """A backend. Called from one thread at a time; raises `TrainerError`s, and then leaves the adapter as it was."""

    def base_model(self) -> BaseModelInfo: ...

    def capabilities(self) -> EngineCapabilities: ...

    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        """A new adapter: A drawn from the seed as PEFT draws it, B zero, fresh optimizer."""

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        """Clips, steps AdamW, clears the accumulator. Metrics hold `grad_norm` (before clipping).

        An empty accumulator counts as zero gradient and still advances the step. A non-finite
        gradient norm raises UserError and changes nothing but the accumulator, which is cleared.
        """

    def clear_gradients(self, adapter_id: str) -> None:
        """Drops what was accumulated since the last step; weights, moments and step stay."""

    def state(self, adapter_id: str) -> AdapterState:
        """A copy that later calls do not change."""

    def weights(self, adapter_id: str) -> AdapterState:
        """As `state`, without moments and gradients. An engine that need not copy those does not."""
        state = self.state(adapter_id)
        return AdapterState(state.lora, state.optimizer_step, state.weights_only().tensors)

    def load_state(self, adapter_id: str, state: AdapterState, with_optimizer: bool) -> None:
        """Sets an adapter, creating it if it is not there, also beyond the limits on slots and rank.

        Those are for new adapters: one that has lived here comes back whatever they have been lowered to.
        Gradients come from `state` only `with_optimizer` (a snapshot); a checkpoint has none.
        Without the optimizer, moments and step restart.
        """

    def export(self, state: AdapterState, target: Path, layout: ExportLayout) -> None:
        """Writes files that plain PEFT or transformers load, into the existing directory `target`."""

    def adapter_shapes(self, lora: LoraSpec) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of such an adapter's weights on this base model, by `<module>.lora_A|B`.

        From any thread. Raises UserError where this base model can have none.
        """

    def embedding_shapes(self) -> Sequence[tuple[int, ...]]:
        """Return the shapes of the base model's embeddings, of which PEFT may write copies next to an adapter.

        From any thread.
        """

    def read_adapter(self, config: bytes, weights: bytes, announced: AnnouncedAdapter) -> AdapterState:
        """The way back from `export`'s PEFT layout and from a checkpoint's files, which anybody may have made.

        From any thread; no adapter here changes. Raises UserError for what is no adapter of this base model.
        """

    def drop(self, adapter_id: str) -> None:
        """Frees the adapter's slot. Unknown ids are ignored."""

    def close(self) -> None:
        """Ends what the engine runs beside this process, if anything. Nothing is asked of it after that. Idempotent."""
        return
