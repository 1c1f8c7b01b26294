"""The PEFT engine: LoRA adapters of many clients on one base model, on the CPU or one GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import structlog
import torch
from typing_extensions import override

from tinsmith_trainer.engines.adapters import check_limits, check_seed
from tinsmith_trainer.engines.base import (
    AdamParams,
    AdapterState,
    AnnouncedAdapter,
    Call,
    Engine,
    EngineCapabilities,
    ExportLayout,
    LoraProducts,
    LoraSpec,
    Outcome,
    Work,
)
from tinsmith_trainer.engines.batching import PACKED_BELOW_TOKENS, check_tokens, plan_microbatches
from tinsmith_trainer.engines.export import BaseFiles, export_adapter
from tinsmith_trainer.engines.imports.files import Embeddings, read_adapter, stored_embeddings
from tinsmith_trainer.engines.losses import loss_names, prepare_loss
from tinsmith_trainer.engines.peft.adapter import (
    Adapter,
    AdapterLayout,
    plan_layout,
    read_state,
    read_weights,
    write_state,
)
from tinsmith_trainer.engines.peft.calls import PeftCall, select_cobatch, with_placed_images
from tinsmith_trainer.engines.peft.logprobs import choose_loss_kernel
from tinsmith_trainer.engines.peft.settings import PeftEngineSettings
from tinsmith_trainer.engines.peft.shared_forward import check_architecture, run_shares
from tinsmith_trainer.errors import ServerError, UserError
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.torch_model.base_model import BaseModelInfo
from tinsmith_trainer.torch_model.device import needs_device
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import module_family
from tinsmith_trainer.torch_model.packing import changing_angles, packs, packs_within_rounding
from tinsmith_trainer.torch_model.rows import keeps_rows_apart

log = structlog.get_logger(__name__)


class PeftEngine(Engine):
    """Adapters over one TorchModel.

    With `numerics: exact` the engine is `batch_invariant` on the CPU in float32, for models whose rows are independent
    (docs/design.md). Calls of other models share no forwards, because a call that is replayed alone would then have
    other bits. With `numerics: fast` all calls may share forwards.

    Raises ModelDirectoryInvalid for an architecture that it cannot train, and ServerError for products or kernels that
    its weights or device do not support.
    """

    def __init__(self, torch_model: TorchModel, settings: PeftEngineSettings) -> None:
        check_architecture(torch_model)
        _set_up_products(torch_model, settings.lora_products)
        self._torch_model = torch_model
        kernel = choose_loss_kernel(settings.loss_kernel, torch_model.device, torch_model.model.dtype)
        self._settings = replace(settings, loss_kernel=kernel)
        model = torch_model.model
        can_be_exact = torch_model.device.type == "cpu" and model.dtype == torch.float32
        self._is_fast = settings.numerics == "fast"
        self._is_invariant = not self._is_fast and can_be_exact and keeps_rows_apart(torch_model.decoder)
        self._packs_below = self._longest_packed(settings)
        angles = changing_angles(model.config)
        self._angles_change_after = angles.behind if angles is not None else None
        self._families = {module_family(name) for name in torch_model.layers}
        self._adapters: dict[str, Adapter] = {}

    def _longest_packed(self, settings: PeftEngineSettings) -> int:
        """Return the length below which datums are packed, or 0 if this model's datums stay in rows."""
        model, decoder = self._torch_model, self._torch_model.decoder
        if self._is_fast:
            on_cpu = model.device.type == "cpu"
            longest = PACKED_BELOW_TOKENS if on_cpu else model.info.max_sequence_length + 1
            return longest if packs_within_rounding(decoder, model.model.config, longest) else 0
        recomputes = settings.recompute_above_tokens < PACKED_BELOW_TOKENS  # only rows are recomputed
        if not self._is_invariant or recomputes or not packs(decoder, model.model.config, PACKED_BELOW_TOKENS):
            return 0
        return PACKED_BELOW_TOKENS

    @override
    def clock_seconds(self) -> float:
        return super().clock_seconds() - self._torch_model.shared_device.turns.waited_seconds[Use.TRAINING]

    @override
    def base_model(self) -> BaseModelInfo:
        return self._torch_model.info

    @override
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            engine="peft",
            losses=loss_names(map_stable_reinforce=self._settings.map_stable_reinforce, custom=True),
            max_rank=self._settings.max_rank,
            adapter_slots=self._settings.adapter_slots,
            batch_invariant=self._is_invariant,
            numerics=self._settings.numerics,
            images=self._torch_model.vision is not None,
            train_attn="attn" in self._families,
            train_mlp="mlp" in self._families and not self._torch_model.frozen_experts,
        )

    @override
    @needs_device()
    def create_adapter(self, adapter_id: str, lora: LoraSpec) -> None:
        if adapter_id in self._adapters:
            raise ServerError(f"Adapter {adapter_id} exists already.")
        settings = self._settings
        check_limits(lora, len(self._adapters), max_rank=settings.max_rank, adapter_slots=settings.adapter_slots)
        adapter = self._new_adapter(lora)
        adapter.draw()
        self._adapters[adapter_id] = adapter

    def _new_adapter(self, lora: LoraSpec) -> Adapter:
        check_seed(lora.seed)
        return Adapter(lora, self._layout(lora), self._torch_model.device)

    def _layout(self, lora: LoraSpec) -> AdapterLayout:
        if lora.train_mlp and self._torch_model.frozen_experts:
            raise UserError(
                f"train_mlp cannot train the experts of {self._torch_model.info.architecture} on this server. Set "
                f"train_mlp to False."
            )
        return plan_layout(lora, self._torch_model.layers)

    @override
    @needs_device()
    def start(self, work: Work) -> Call:
        info, settings = self._torch_model.info, self._settings
        work = with_placed_images(self._torch_model, work)
        adapter = self._adapter(work.adapter_id)
        loss = prepare_loss(work.loss, work.datums, map_stable_reinforce=settings.map_stable_reinforce, custom=True)
        check_tokens(work.datums, vocab_size=info.vocab_size, max_length=info.max_sequence_length)
        plan = plan_microbatches(
            work.datums,
            max_length=info.max_sequence_length,
            token_budget=settings.token_budget,
            packs_below=self._packs_below,
            by_products=not self._is_fast,
            angles_change_after=self._angles_change_after,
        )
        return PeftCall(work, adapter, loss, plan)

    @property
    def _shares_forwards(self) -> bool:
        return self._is_invariant or self._is_fast

    @override
    def cobatch_room(self, call: Call) -> int:
        own = cast("PeftCall", call)
        if own.is_alone or not self._shares_forwards:
            return 0
        return max(0, self._settings.cobatch_tokens - own.next_tokens)

    @override
    def cobatch(self, calls: Sequence[Call]) -> Sequence[Call]:
        most_tokens = self._settings.cobatch_tokens if self._shares_forwards else 0
        return select_cobatch(cast("Sequence[PeftCall]", calls), most_tokens)

    @override
    def advance(self, calls: Sequence[Call]) -> None:
        group = cast("Sequence[PeftCall]", calls)
        try:
            with needs_device():
                shares = [call.share(self._torch_model.vision) for call in group]
                results = run_shares(self._torch_model, shares, self._settings)
            for call, result in zip(group, results, strict=True):
                call.take(result)
        except Exception as error:  # also for our own errors, because gradients of all calls may already be added
            log.exception("a microbatch failed", adapters=[call.work.adapter_id for call in group])
            _fail(group, error)

    @override
    @needs_device()
    def finish(self, call: Call) -> Outcome:
        return cast("PeftCall", call).finish()

    def _adapter(self, adapter_id: str) -> Adapter:
        try:
            return self._adapters[adapter_id]
        except KeyError:
            raise ServerError(f"Adapter {adapter_id} is not loaded in this worker.") from None

    @override
    @needs_device()
    def optim_step(self, adapter_id: str, params: AdamParams) -> dict[str, float]:
        adapter = self._adapter(adapter_id)
        with self._torch_model.shared_device.turns.held(Use.TRAINING):
            return adapter.optim_step(params)

    @override
    def clear_gradients(self, adapter_id: str) -> None:
        self._adapter(adapter_id).gradients = None

    @override
    @needs_device()
    def state(self, adapter_id: str) -> AdapterState:
        return read_state(self._adapter(adapter_id))

    @override
    @needs_device()
    def weights(self, adapter_id: str) -> AdapterState:
        return read_weights(self._adapter(adapter_id))

    @override
    @needs_device()
    def load_state(self, adapter_id: str, state: AdapterState, with_optimizer: bool) -> None:
        adapter = self._new_adapter(state.lora)
        write_state(adapter, state, with_optimizer=with_optimizer)
        self._adapters[adapter_id] = adapter

    @override
    def export(self, state: AdapterState, target: Path, layout: ExportLayout) -> None:
        model = self._torch_model
        export_adapter(BaseFiles(model.directory, model.info.path, model.model.dtype), state, target, layout)

    @override
    def adapter_shapes(self, lora: LoraSpec) -> Mapping[str, tuple[int, ...]]:
        return self._layout(lora).shapes

    @override
    def read_adapter(self, config: bytes, weights: bytes, announced: AnnouncedAdapter) -> AdapterState:
        return read_adapter(config, weights, announced, self.adapter_shapes, self._embeddings())

    @override
    def embedding_shapes(self) -> Sequence[tuple[int, ...]]:
        return [tuple(stored.header.shape) for stored in self._embeddings().values()]

    def _embeddings(self) -> Embeddings:
        return stored_embeddings(self._torch_model.directory, self._torch_model.model.config)

    @override
    def drop(self, adapter_id: str) -> None:
        self._adapters.pop(adapter_id, None)


def _set_up_products(torch_model: TorchModel, lora_products: LoraProducts) -> None:
    """Set the precision of products. Raises ServerError if the device or weights do not support it."""
    if lora_products == "bfloat16" and torch_model.model.dtype != torch.bfloat16:
        raise ServerError("--lora-products bfloat16 requires base weights in bfloat16: also give --dtype bfloat16.")
    if lora_products == "tf32" and torch_model.device.type != "cuda":
        raise ServerError("--lora-products tf32 requires a GPU, and this worker uses the CPU: omit it.")
    if torch_model.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = lora_products == "tf32"


def _fail(group: Sequence[PeftCall], error: Exception) -> None:
    """Record a failure. If several calls shared the forward, the cause is unknown, and each is retried alone."""
    if len(group) > 1:
        for call in group:
            call.restart_alone()
        return
    # A damaged image, or a custom loss that is not finite.
    if isinstance(error, UserError):
        group[0].error = error
        return
    group[0].error = ServerError(f"The computation failed in this worker, and the model is unchanged: {error}")
