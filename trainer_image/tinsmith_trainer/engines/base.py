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

from tinsmith_trainer.errors import TrainerError

ExportLayout = Literal["peft", "merged"]


@dataclass(frozen=True, slots=True)
class Datum:
    """Input tokens and the loss's per-token inputs.

    `tokens` is int32 `[T]`. Every loss input is dense: `target_tokens` int64 `[T]` or `[T, K]`,
    all others float32 of the same shape as `target_tokens` or `[T]`.
    """

    tokens: NDArray[np.int32]
    loss_inputs: Mapping[str, NDArray[np.int64] | NDArray[np.float32]] = field(default_factory=dict)

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
    """One forward_backward (or forward) call on one adapter."""

    adapter_id: str
    datums: Sequence[Datum]
    loss: LossSpec
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a Work. Either `error` is set, or outputs hold one mapping per datum, in order.

    `outputs[i]["logprobs"]` is float32 of `target_tokens`' shape. `metrics` keys are `name:reduction`.
    """

    outputs: Sequence[Mapping[str, NDArray[np.float32]]] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    trained_tokens: int = 0
    error: TrainerError | None = None


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
class BaseModelInfo:
    """The base weights an engine has loaded. `revision` is a digest over the files that decide them."""

    path: str
    architecture: str
    revision: str
    vocab_size: int
    max_sequence_length: int


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    engine: str
    losses: tuple[str, ...]
    max_rank: int
    adapter_slots: int
    batch_invariant: bool
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


class Engine(Protocol):
    """A backend. Called from one thread at a time; raises `TrainerError`s.

    A call that raises, or an Outcome with an error, leaves the adapter as it was.
    """

    def base_model(self) -> BaseModelInfo: ...

    def capabilities(self) -> EngineCapabilities: ...

    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        """A new adapter: A drawn from the seed as PEFT draws it, B zero, fresh optimizer."""

    def forward_backward(self, work: Sequence[Work]) -> Sequence[Outcome]:
        """Runs calls of several adapters, at most one each; adds gradients to each accumulator.

        An Outcome's bits do not depend on the other works in the call. User errors come as
        `Outcome.error`, one per work.
        """

    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        """Clips, steps AdamW, clears the accumulator. Metrics hold `grad_norm` (before clipping).

        An empty accumulator counts as zero gradient and still advances the step. A non-finite
        gradient norm raises UserError and changes nothing but the accumulator, which is cleared.
        """

    def clear_gradients(self, adapter_id: str) -> None:
        """Drops what was accumulated since the last step; weights, moments and step stay."""

    def state(self, adapter_id: str) -> AdapterState:
        """A copy that later calls do not change."""

    def load_state(self, adapter_id: str, state: AdapterState, with_optimizer: bool) -> None:
        """Sets an adapter, creating it if it is not there, also beyond the limits on slots and rank.

        Those are for new adapters: one that has lived here comes back whatever they have been lowered to.
        Gradients come from `state` only `with_optimizer` (a snapshot); a checkpoint has none.
        Without the optimizer, moments and step restart.
        """

    def export(self, state: AdapterState, target: Path, layout: ExportLayout) -> None:
        """Writes files that plain PEFT or transformers load, into the existing directory `target`."""

    def drop(self, adapter_id: str) -> None:
        """Frees the adapter's slot. Unknown ids are ignored."""

    def close(self) -> None:
        """Ends what the engine runs beside this process, if anything. Nothing is asked of it after that. Idempotent."""
        return
