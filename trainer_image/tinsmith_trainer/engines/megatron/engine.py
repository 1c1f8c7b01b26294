"""The engine for LoRA adapters of many clients on one base model, over many ranks of any kind."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import cast
from weakref import WeakValueDictionary

import numpy as np
import structlog
import torch
from transformers import AutoConfig
from typing_extensions import override

from tinsmith_trainer.engines.adapters import (
    WEIGHTS,
    check_adam,
    check_limits,
    check_seed,
    check_state,
    draw,
    groups_of,
    step_metrics,
    trained_modules,
)
from tinsmith_trainer.engines.base import (
    AdamParams,
    AdapterState,
    AnnouncedAdapter,
    Call,
    Datum,
    Engine,
    EngineCapabilities,
    ExportLayout,
    LoraSpec,
    LossSpec,
    Outcome,
    Work,
)
from tinsmith_trainer.engines.batching import check_tokens
from tinsmith_trainer.engines.export import BaseFiles, export_adapter
from tinsmith_trainer.engines.imports.files import Embeddings, read_adapter, stored_embeddings
from tinsmith_trainer.engines.losses import TARGETS, loss_names, prepare_loss
from tinsmith_trainer.engines.megatron.batch import RowResults, gather
from tinsmith_trainer.engines.megatron.calls import (
    MegatronCall,
    SharingLimits,
    arrays_of,
    datums_of,
    outcomes_of,
    select_cobatch,
)
from tinsmith_trainer.engines.megatron.flags import MegatronSettings
from tinsmith_trainer.engines.megatron.rank_group import RankGroup, RanksFailed, RanksLost
from tinsmith_trainer.engines.megatron.sharding import MAX_ROWS, shards_of
from tinsmith_trainer.engines.megatron.step.shared_calls import ends_of
from tinsmith_trainer.engines.megatron.step.tensor_parts import Shape, TensorPart, Tensors, join, whole_shapes
from tinsmith_trainer.engines.megatron.step.train_step import StepState
from tinsmith_trainer.errors import ServerError, TrainerError
from tinsmith_trainer.process.exit import end_process
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.torch_model.packing import PROBE_TOLERANCE

log = structlog.get_logger(__name__)

A_SUFFIX = ".lora_A"
SHARING_BYTES = 4 * 2**30
"""The memory of a rank for the adapters of a shared forward: copies of their weights, and their gradients."""
SHARED_BYTES_PER_PARAMETER = 8
"""A weight and a gradient, both in float32."""
TRIAL_ADAPTER = "packing trial"
TRIAL_LENGTHS = (5, 19, 11)


@dataclass(slots=True)
class _Adapter:
    """An adapter on the ranks: the shapes of the whole tensors, in the order of initialization."""

    lora: LoraSpec
    shapes: Mapping[str, Shape]
    step: int = 0

    @property
    def scale(self) -> float:
        return self.lora.alpha / self.lora.rank


class MegatronEngine(Engine):
    """The engine over a group of ranks.

    The engine checks each call before the call starts, because an error on only some ranks would end the process.

    A call is not divided: `advance` computes the whole call, and the ranks hold its gradients until `finish`. With
    `numerics: exact` the ranks compute one call at a time, so a call's bits do not depend on other calls. The engine is
    not declared batch invariant: the datums of a call are padded to one length, and padding changes how sums are
    rounded. With `numerics: fast`, small calls of several adapters share forwards, and datums are packed if a trial at
    the start agrees with rows.
    """

    def __init__(
        self, name: str, ranks: RankGroup, base: BaseFiles, info: BaseModelInfo, settings: MegatronSettings
    ) -> None:
        """Build the engine. `name` is the engine's value of `--engine`."""
        self._name = name
        self._ranks = ranks
        self._base = base
        self._info = info
        self._settings = settings
        self._parts: list[tuple[TensorPart, ...]] = ranks.all("ts_parts")
        self._modules = sorted(
            {part.name.removesuffix(A_SUFFIX) for own in self._parts for part in own if part.name.endswith(A_SUFFIX)}
        )
        self._adapters: dict[str, _Adapter] = {}
        self._numbers = count()
        # The calls whose gradients the ranks hold. A dropped call leaves this dictionary by itself, and the ranks drop
        # its gradients at the next call.
        self._held: WeakValueDictionary[int, MegatronCall] = WeakValueDictionary()
        self._limits = self._sharing_limits()
        self._packs = self._may_pack()

    def _sharing_limits(self) -> SharingLimits:
        """Return the limits on shared forwards, and log the reason if each forward has only one call."""
        largest = max((sum(math.prod(part.shape) for part in own) for own in self._parts), default=0)
        calls = SHARING_BYTES // (SHARED_BYTES_PER_PARAMETER * max(1, largest))
        if reason := self._reason_to_compute_alone(calls):
            log.info("each forward has one call", reason=reason)
            calls = 1
        else:
            each = SHARED_BYTES_PER_PARAMETER * largest
            log.info("calls share forwards", calls=calls, bytes_per_adapter=each, bytes_of_a_rank=SHARING_BYTES)
        return SharingLimits(self._settings.token_budget * self._ranks.parallelism.data, calls)

    def _reason_to_compute_alone(self, calls: int) -> str | None:
        if not self._is_fast:
            return "numerics are exact"
        if self._ranks.parallelism.context > 1:
            return "context ranks pack sequences of any call"
        if any(part.among == "expert" for own in self._parts for part in own):
            return "an expert receives tokens without their call"
        return f"two adapters need more than {SHARING_BYTES} bytes of a rank" if calls < 2 else None

    def _may_pack(self) -> bool:
        """Return whether datums are packed, and log the reason if they are padded."""
        if not self._is_fast:
            reason = "numerics are exact"
        elif self._ranks.parallelism.context > 1:
            reason = "NeMo RL packs for context ranks itself"
        elif not self._trial_agrees():
            reason = "the trial at the start failed"
        else:
            return True
        log.info("datums are padded to rows of one length", reason=reason)
        return False

    def _trial_agrees(self) -> bool:
        """Return whether packed datums have the logprobs of rows, which depends on the attention of the ranks."""
        tokens = np.arange(self._info.max_sequence_length + 1, dtype=np.int64) % self._info.vocab_size
        lengths = [min(length, self._info.max_sequence_length) for length in TRIAL_LENGTHS]
        datums = [Datum(tokens[:one].astype(np.int32), {TARGETS: tokens[1 : one + 1]}) for one in lengths]
        self.create_adapter(TRIAL_ADAPTER, LoraSpec(rank=1, alpha=1.0, seed=0))
        work = Work(TRIAL_ADAPTER, datums, LossSpec("cross_entropy"), forward_only=True)
        call = cast("MegatronCall", self.start(work))
        try:
            packed, rows = (gather(self._on_ranks([call], packed=packed), datums) for packed in (True, False))
        except ServerError as error:
            log.warning("the ranks cannot compute packed datums", error=str(error))
            return False
        finally:
            self.drop(TRIAL_ADAPTER)
        apart = max(float(np.abs(one.logprobs - two.logprobs).max()) for one, two in zip(packed, rows, strict=True))
        return apart <= PROBE_TOLERANCE[self._base.dtype]

    @property
    def _is_fast(self) -> bool:
        return self._settings.numerics == "fast"

    @override
    def base_model(self) -> BaseModelInfo:
        return self._info

    @override
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine=self._name,
            losses=loss_names(map_stable_reinforce=self._settings.map_stable_reinforce),
            max_rank=self._settings.max_rank,
            adapter_slots=self._settings.adapter_slots,
            batch_invariant=False,
            numerics=self._settings.numerics,
            divides_calls=False,
        )

    @override
    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        if adapter_id in self._adapters:
            raise ServerError(f"Adapter {adapter_id} exists already.")
        settings = self._settings
        check_limits(lora, len(self._adapters), max_rank=settings.max_rank, adapter_slots=settings.adapter_slots)
        adapter = self._new_adapter(lora)
        with self._all_ranks():
            self._ranks.all("ts_create", adapter_id, adapter.scale, dict(draw(lora.seed, adapter.shapes)))
        self._adapters[adapter_id] = adapter

    def _new_adapter(self, lora: LoraSpec) -> _Adapter:
        check_seed(lora.seed)
        return _Adapter(lora, self.adapter_shapes(lora))

    def _adapter(self, adapter_id: str) -> _Adapter:
        try:
            return self._adapters[adapter_id]
        except KeyError:
            raise ServerError(f"Adapter {adapter_id} is not loaded in this worker.") from None

    @override
    def start(self, work: Work) -> Call:
        self._adapter(work.adapter_id)
        loss = prepare_loss(work.loss, work.datums, map_stable_reinforce=self._settings.map_stable_reinforce)
        check_tokens(work.datums, vocab_size=self._info.vocab_size, max_length=self._info.max_sequence_length)
        return MegatronCall(work, loss, next(self._numbers))

    @override
    def cobatch_room(self, call: Call) -> int:
        own = cast("MegatronCall", call)
        return max(0, self._limits.tokens - own.tokens) if own.may_share and self._limits.calls > 1 else 0

    @override
    def cobatch(self, calls: Sequence[Call]) -> Sequence[Call]:
        return select_cobatch(cast("Sequence[MegatronCall]", calls), self._limits)

    @override
    def advance(self, calls: Sequence[Call]) -> None:
        group = cast("Sequence[MegatronCall]", calls)
        try:
            # Tensor ranks may divide the packed tokens, and a rank would not know the call of its part.
            packed = self._packs and (len(group) == 1 or self._ranks.parallelism.tensor == 1)
            outcomes = outcomes_of(group, gather(self._on_ranks(group, packed=packed), datums_of(group)))
        except TrainerError as error:
            _fail(group, error)
            return
        for call, outcome in zip(group, outcomes, strict=True):
            call.outcome = outcome

    def _on_ranks(self, group: Sequence[MegatronCall], *, packed: bool) -> list[RowResults]:
        """Compute on all ranks. Raises ServerError if every rank failed at the same point without an effect."""
        layout = self._ranks.parallelism
        calls = [call.on_ranks(packed=packed) for call in group]
        shards = shards_of(
            datums_of(group),
            arrays_of(group),
            layout,
            self._settings.token_budget,
            packed=packed,
            most_rows=self._settings.token_budget if self._is_fast else MAX_ROWS,
            call_ends=ends_of(calls),
        )
        # Stages, and ranks that share experts, may fail at different points. The next call would then receive messages
        # of this one.
        is_out_of_step = layout.pipeline > 1 or layout.expert > 1
        guard = self._all_ranks if is_out_of_step else self._lost_ranks_end_the_process
        kept = list(self._held)
        self._held.update({call.number: call for call in group if not call.work.forward_only})
        try:
            with guard():
                by_shard = self._ranks.sharded("ts_forward_backward", shards, calls, kept)
        except RanksFailed as error:
            log.exception("a call failed on all ranks", model_ids=[call.adapter_id for call in calls])
            raise ServerError(f"The computation failed in this worker, and the model is unchanged: {error}") from error
        return [results for shard in by_shard for results in shard]

    @override
    def finish(self, call: Call) -> Outcome:
        own = cast("MegatronCall", call)
        if own.error is not None:
            raise own.error
        assert own.outcome is not None, "the call is computed"
        if self._held.pop(own.number, None) is not None:
            with self._all_ranks():
                self._ranks.all("ts_add_gradients", own.work.adapter_id, own.number)
        return own.outcome

    @override
    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        adapter = self._adapter(adapter_id)
        check_adam(params)
        with self._all_ranks():
            norm = self._ranks.all("ts_optim_step", adapter_id, params)[0]
        adapter.step += 1
        return step_metrics(norm, params, adapter.step)

    @override
    def clear_gradients(self, adapter_id: str) -> None:
        self._adapter(adapter_id)
        with self._all_ranks():
            self._ranks.all("ts_clear_gradients", adapter_id)

    @override
    def state(self, adapter_id: str) -> AdapterState:
        adapter = self._adapter(adapter_id)
        with self._all_ranks():
            reported: list[StepState | None] = self._ranks.all("ts_state", adapter_id)
        known = next(state for state in reported if state is not None)
        whole = {group: self._joined(reported, group, adapter.shapes) for group in known.groups}
        tensors = {f"{group}/{name}": tensor.numpy() for group, own in whole.items() for name, tensor in own.items()}
        return AdapterState(adapter.lora, known.step, tensors)

    def _joined(self, reported: Sequence[StepState | None], group: str, shapes: Mapping[str, Shape]) -> Tensors:
        held = [None if state is None else state.groups[group] for state in reported]
        return join(held, self._parts, self._ranks.parallelism, shapes)

    @override
    def load_state(self, adapter_id: str, state: AdapterState, with_optimizer: bool) -> None:
        """Set an adapter. Raises ServerError if the adapter's LoRA rank exceeds the padded LoRA rank of the model."""
        adapter = self._new_adapter(state.lora)
        if state.lora.rank > self._settings.max_rank:
            raise ServerError(
                f"Adapter {adapter_id} has rank {state.lora.rank}, and this worker supports ranks up to "
                f"{self._settings.max_rank}: max_rank was lowered since the adapter was created. Set it to at "
                f"least {state.lora.rank}."
            )
        check_state(state, adapter.shapes)
        adapter.step = state.optimizer_step if with_optimizer else 0
        groups = {
            group: {name: torch.tensor(state.tensors[f"{group}/{name}"]) for name in adapter.shapes}
            for group in (groups_of(state) if with_optimizer else [WEIGHTS])
        }
        with self._all_ranks():
            self._ranks.all("ts_load_state", adapter_id, adapter.scale, StepState(adapter.step, groups))
        self._adapters[adapter_id] = adapter

    @override
    def export(self, state: AdapterState, target: Path, layout: ExportLayout) -> None:
        export_adapter(self._base, state, target, layout)

    @override
    def adapter_shapes(self, lora: LoraSpec) -> Mapping[str, Shape]:
        return whole_shapes(self._parts, trained_modules(lora, self._modules), lora.rank)

    @override
    def read_adapter(self, config: bytes, weights: bytes, announced: AnnouncedAdapter) -> AdapterState:
        return read_adapter(config, weights, announced, self.adapter_shapes, self._embeddings())

    @override
    def embedding_shapes(self) -> Sequence[Shape]:
        return [tuple(stored.header.shape) for stored in self._embeddings().values()]

    def _embeddings(self) -> Embeddings:
        return stored_embeddings(self._base.directory, AutoConfig.from_pretrained(self._base.directory))

    @override
    def drop(self, adapter_id: str) -> None:
        if self._adapters.pop(adapter_id, None) is not None:
            with self._all_ranks():
                self._ranks.all("ts_drop", adapter_id)

    @override
    def close(self) -> None:
        self._ranks.close()

    @contextlib.contextmanager
    def _all_ranks(self) -> Iterator[None]:
        """Treat every failure as a loss of the ranks, for calls that may leave the ranks in different states."""
        with self._lost_ranks_end_the_process():
            try:
                yield
            except RanksFailed as error:
                raise RanksLost(str(error)) from error

    @contextlib.contextmanager
    def _lost_ranks_end_the_process(self) -> Iterator[None]:
        """End the process if ranks are lost. The next process restores the snapshots and replays later calls."""
        try:
            yield
        except RanksLost:
            end_process("the ranks of the model are lost")
            raise


def _fail(group: Sequence[MegatronCall], error: TrainerError) -> None:
    """Record a failure. If several calls shared the forward, the cause is unknown, and each is computed alone."""
    for call in group:
        if len(group) > 1:
            call.runs_alone = True
        else:
            call.error = error
