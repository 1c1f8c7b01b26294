"""A forward of the shared model with explicit masks, positions, keys and values, in turns of the device."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from tinsmith_trainer.errors import ServerError, is_out_of_memory
from tinsmith_trainer.process.device_turns import Use
from tinsmith_trainer.sampling.builtin.claims import ForwardCost
from tinsmith_trainer.sampling.builtin.draws import on_device
from tinsmith_trainer.sampling.builtin.kv_cache import (
    BlockView,
    GeometryProbe,
    KvGeometry,
    PromptPart,
    PromptsView,
    SharedPrefix,
    StepView,
)
from tinsmith_trainer.sampling.builtin.settings import BuiltinSamplerSettings
from tinsmith_trainer.sampling.builtin.steps.memory import StepSizes
from tinsmith_trainer.sampling.builtin.steps.recorded import RecordedSteps, StepInputs, recorder_for
from tinsmith_trainer.torch_model.attention import use_attention
from tinsmith_trainer.torch_model.device import end_if_device_is_lost
from tinsmith_trainer.torch_model.experts import expert_projections
from tinsmith_trainer.torch_model.loading import TorchModel
from tinsmith_trainer.torch_model.lora import Route, routed
from tinsmith_trainer.torch_model.packing import changing_angles

KvView = BlockView | PromptsView | StepView
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of computing a prompt with images.

    The fields are the last hidden states `[length, d]`, and the difference between rotary positions and token positions
    after the prompt.
    """

    hidden: Tensor
    angle_shift: int


FULL, SLIDING = "full_attention", "sliding_attention"
PROBE_TOKENS = 5

log = structlog.get_logger(__name__)


class ForwardPass:
    """Forwards of the model. The constructor raises ServerError for an architecture that the loop cannot serve."""

    memory = "keys and values"

    def __init__(self, torch_model: TorchModel) -> None:
        self._model = torch_model.model
        self._decoder = torch_model.decoder
        self._torch_model = torch_model
        self._turns = torch_model.shared_device.turns
        self.device: torch.device = torch_model.device
        self.modules = tuple(torch_model.layers)
        config = torch_model.model.config.get_text_config()
        self._layer_types = _layer_types(config)
        self._window: int = getattr(config, "sliding_window", None) or 0
        check_rotations(torch_model)
        self._check_supported()
        self.geometry = self._probe()
        self.cost = ForwardCost.on(self.device.type, self.geometry.bytes_per_token / weight_bytes(self._model))
        self.busy_seconds = 0.0
        # Experts read the numbers of their tokens from the device, which cannot be recorded.
        self.recorder = None if expert_projections(torch_model.decoder) else recorder_for(self.device)

    def step_sizes(self, settings: BuiltinSamplerSettings) -> StepSizes:
        """Return the sizes of the largest decode step."""
        config = self._model.config.get_text_config()
        repeats = config.num_attention_heads // self.geometry.kv_heads
        return StepSizes(
            self.geometry.layers,
            repeats,
            config.vocab_size,
            self._model.dtype.itemsize,
            settings.max_rows,
            records=self.recorder is not None and not settings.deterministic,
        )

    @torch.inference_mode()
    def block(self, kv: Tensor, ids: Tensor, start: int, route: Route, *, all_logits: bool) -> Tensor:
        """Compute `ids` `[1, length]` after `start` tokens in `kv`.

        Return the logits of all positions, `[length, vocab]`, or of the last position, `[1, vocab]`, in float32.
        """
        length = ids.shape[1]
        positions = torch.arange(start, start + length, device=self.device)[None]
        view = BlockView(kv, start, length)
        keep = 0 if all_logits else 1
        output = self._run(
            lambda: self._forward(self._model, ids, positions, view, start + length, logits_to_keep=keep), route
        )
        logits: Tensor = output.logits.float()
        return logits[0]

    @torch.inference_mode()
    def seen(self, kv: Tensor, ids: Tensor, inputs: Mapping[str, Tensor], route: Route) -> Seen:
        """Compute a whole prompt with images by the model's own forward, from `ids` `[1, length]` and `inputs`.

        This forward computes no logits, because logits would have one row for each token of the prompt. `project`
        computes the requested logits.
        """
        cache = DynamicCache()  # without a configuration, so that layers with a window keep all positions, like `kv`
        with self._turns.held(Use.SAMPLING), routed(route):
            started = time.perf_counter()
            whole = self._model.base_model
            output = whole(input_ids=ids, past_key_values=cache, use_cache=True, **inputs)
            shift = getattr(whole, "rope_deltas", None)
            self.busy_seconds += time.perf_counter() - started
        for layer, states in enumerate(cache.layers):
            kv[layer, 0, :, :, : ids.shape[1]] = states.keys
            kv[layer, 1, :, :, : ids.shape[1]] = states.values
        return Seen(output.last_hidden_state[0], 0 if shift is None else int(shift))

    @torch.inference_mode()
    def project(self, hidden: Tensor, route: Route) -> Tensor:
        """Return logits `[n, vocab]` in float32 from last hidden states `[n, d]`."""
        with self._turns.held(Use.SAMPLING), routed(route):
            logits = self._torch_model.logit_transform(self._torch_model.unembed(hidden[None]))
        return logits[0].float()

    @torch.inference_mode()
    def prompts(self, parts: Sequence[PromptPart], ids: Tensor, route: Route) -> None:
        """Compute keys and values of `ids` `[len(parts), length]` without logits.

        Tokens after the end of a part are padding.
        """
        length = ids.shape[1]
        starts = on_device([part.start for part in parts], torch.long, self.device)
        positions = starts[:, None] + torch.arange(length, device=self.device)
        end = max(part.end for part in parts)
        self._run(lambda: self._forward(self._decoder, ids, positions, PromptsView(parts), end), route)

    @torch.inference_mode()
    def step(
        self,
        kv: Tensor,
        ids: Tensor,
        positions: Tensor,
        extent: int,
        route: Route,
        rows: list[int] | None = None,
        *,
        angles: Tensor | None = None,
        shared: Sequence[PrefixSpan] = (),
        recorded: RecordedSteps | None = None,
    ) -> Tensor:
        """Compute one token per row: `ids` and `positions` `[rows, 1]`. Return logits `[rows, vocab]` in float32.

        `rows` are row numbers in `kv`; by default the first rows. The rows in `shared` contain only the tokens after
        the shared prefix. `angles` are the rotary positions if rotary positions differ from `positions`. `recorded` are
        the recorded steps with these keys and values.
        """
        chosen = None if rows is None else on_device(rows, torch.long, self.device)
        own = positions.clone() if shared else positions
        for span in shared:
            own[span.start : span.end] -= span.prefix.tokens
        inputs = StepInputs(ids, own, positions if shared and angles is None else angles)

        def compute(given: StepInputs) -> Tensor:
            with use_attention(SharedAttention(shared)) if shared else nullcontext():
                return self._logits(StepView(kv, given.positions, extent, chosen), given, extent)

        if recorded is None or rows is not None:  # the numbers of rows in a subset are too many to record
            return self._run(lambda: compute(inputs), route)
        return self._run(lambda: recorded.run(inputs, extent, route, compute), route)

    def _logits(self, view: StepView, inputs: StepInputs, extent: int) -> Tensor:
        output = self._forward(self._model, inputs.ids, inputs.positions, view, extent, angles=inputs.angles)
        logits: Tensor = output.logits.float()
        return logits[:, 0]

    def shares_prefixes(self) -> bool:
        """Try to replace the model's attention by the attention for shared prefixes. Return whether this works.

        Errors that the model does not cause, such as OutOfMemory, are raised.
        """
        if self.device.type != "cpu" or self._layer_types != (FULL,):
            return False
        try:
            return self._comes_out_alike()
        except Exception as error:  # a model may fail in any way with an unexpected attention
            if is_out_of_memory(error):
                raise
            end_if_device_is_lost(error)
            log.info("prompts are not shared", model=type(self._model).__name__, error=str(error))
            return False

    def _comes_out_alike(self) -> bool:
        """Return whether two samples of one prompt get equal logits with separate prompts and with a shared prompt."""
        kv, own = self.geometry.allocate(2, PROBE_TOKENS + 1), self.geometry.allocate(2, 1)
        self.block(kv[:, :, :1], torch.arange(PROBE_TOKENS)[None], 0, {}, all_logits=False)
        kv[:, :, 1] = kv[:, :, 0]
        span = PrefixSpan(0, 2, SharedPrefix(kv[:, :, :1, :, :PROBE_TOKENS].clone(), PROBE_TOKENS, 0))
        ids, positions = torch.tensor([[1], [2]]), torch.full((2, 1), PROBE_TOKENS)
        plain = self.step(kv, ids, positions, PROBE_TOKENS + 1, {})
        shared = self.step(own, ids, positions, 1, {}, shared=[span])
        tolerance = math.sqrt(torch.finfo(self.geometry.dtype).eps) * float(plain.abs().max())
        return torch.allclose(shared, plain, rtol=0, atol=tolerance)

    def _run(self, compute: Callable[[], Result], route: Route) -> Result:
        """Compute a forward in a turn of the device."""
        with self._turns.held(Use.SAMPLING), routed(route):
            started = time.perf_counter()
            result = compute()
            self.busy_seconds += time.perf_counter() - started
        return result

    def _forward(
        self,
        module: nn.Module,
        ids: Tensor,
        positions: Tensor,
        view: KvView,
        extent: int,
        *,
        angles: Tensor | None = None,
        **options: int,
    ) -> Any:
        return module(
            input_ids=ids,
            position_ids=positions if angles is None else angles,
            attention_mask=self._mask(positions, extent),
            past_key_values=view,
            use_cache=True,
            **options,
        )

    def _mask(self, positions: Tensor, extent: int) -> Tensor | dict[str, Tensor]:
        """Return an additive mask `[rows, 1, length, extent]` of the keys to which each position attends.

        The mask has the model's dtype, because SDPA would convert a boolean mask in every layer. A model with several
        layer types takes one mask for each type.
        """
        keys = torch.arange(extent, device=self.device)
        masks = {}
        for layer_type in self._layer_types:
            seen = keys <= positions[:, None, :, None]
            if layer_type == SLIDING:
                seen &= keys > positions[:, None, :, None] - self._window
            masks[layer_type] = torch.where(seen, 0.0, float("-inf")).to(self.geometry.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _check_supported(self) -> None:
        unknown = sorted(set(self._layer_types) - {FULL, SLIDING})
        if unknown:
            raise ServerError(f"The built-in sampler cannot run layers of type {', '.join(unknown)}.")

    @torch.inference_mode()
    def _probe(self) -> KvGeometry:
        probe = GeometryProbe()
        one = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        mask = torch.zeros(1, 1, 1, 1, dtype=self._model.dtype, device=self.device)
        masks = dict.fromkeys(self._layer_types, mask) if len(self._layer_types) > 1 else mask
        with self._turns.held(Use.SAMPLING):
            self._model(input_ids=one, position_ids=one, attention_mask=masks, past_key_values=probe, use_cache=True)
        geometry = probe.geometry(self.device)
        if geometry is None:
            name = type(self._model).__name__
            raise ServerError(
                f"The built-in sampler cannot run {name}: its layers keep keys and values of several shapes."
            )
        return geometry


def check_rotations(torch_model: TorchModel) -> None:
    """Raise ServerError if a sequence's rotary angles depend on the final length, which is unknown at the beginning.

    A refused model rotates the whole batch by the angles of the longest row, but cached keys have the angles of a
    shorter sequence. Below the length at which the angles change, all sequences have the same angles.
    """
    angles, longest = changing_angles(torch_model.model.config), torch_model.info.max_sequence_length
    if angles is None or (angles.behind is not None and longest <= angles.behind):
        return
    where = f", behind {angles.behind} tokens" if angles.behind else ""
    cure = f"Set the maximum sequence length to {angles.behind} or less, or train" if angles.behind else "Train"
    raise ServerError(
        f"The built-in sampler cannot run {torch_model.info.path} with sequences of {longest} tokens: its rotary "
        f"embeddings of type {angles.rope_type} change with the length of a sequence{where}. "
        f"{cure} it with --no-sampling."
    )


def weight_bytes(model: nn.Module) -> int:
    """Return the number of the model's bytes that a forward reads. Quantized weights are stored in buffers."""
    return sum(tensor.nbytes for tensor in itertools.chain(model.parameters(), model.buffers()))


def _layer_types(config: Any) -> tuple[str, ...]:
    declared = getattr(config, "layer_types", None)
    if declared:
        return tuple(sorted(set(declared)))
    return (SLIDING,) if getattr(config, "sliding_window", None) else (FULL,)


@dataclass(frozen=True, slots=True)
class PrefixSpan:
    """Consecutive rows of a forward that share a prompt."""

    start: int
    end: int
    prefix: SharedPrefix


def prefix_spans(prefixes: Sequence[SharedPrefix | None]) -> list[PrefixSpan]:
    """Return the spans of a forward's rows that share a prefix."""
    spans, start = [], 0
    for prefix, same in itertools.groupby(prefixes):
        end = start + len(list(same))
        if prefix is not None:
            spans.append(PrefixSpan(start, end, prefix))
        start = end
    return spans


class SharedAttention:
    """The attention of a step in which rows share prefixes.

    On a CPU, attention takes as long as reading keys and values. A group of rows that reads the shared prompt only once
    takes a fraction of this time. The token of a row attends to the whole prompt, and to the positions of this row that
    the mask allows. The attention to the prompt and the attention to the row are computed separately. The two results
    are then combined; the weight of a result is the sum of the exponentials of its scores. The weighted sum is equal to
    the attention with one softmax over prompt and row (arXiv 2402.05099). The products of a group have one row per
    sample, so the bits of a sample depend on the other samples in the group.
    """

    def __init__(self, spans: Sequence[PrefixSpan]) -> None:
        self._spans = spans

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        *,
        scaling: float,
        **_options: Any,
    ) -> tuple[Tensor, None]:
        """Return the attention. `query` is `[rows, heads, 1, d]`, `key` and `value` `[rows, kv_heads, tokens, d]`."""
        rows, heads, _, width = query.shape
        grouped = query.view(rows, key.shape[1], -1, width)  # query heads that share a key head
        attended, sums = _attend(grouped, key, value, mask, scaling)
        for span in self._spans:
            together = grouped[span.start : span.end].transpose(0, 1)
            keys, values = span.prefix.of_layer(module.layer_idx)
            seen, seen_sums = _attend(together.flatten(1, 2).unsqueeze(0), keys, values, None, scaling)
            seen, seen_sums = seen.view(together.shape), seen_sums.view(together.shape[:3])
            part = torch.sigmoid(seen_sums.transpose(0, 1) - sums[span.start : span.end])
            attended[span.start : span.end].lerp_(seen.transpose(0, 1), part.unsqueeze(-1).to(seen.dtype))
        return attended.reshape(rows, 1, heads, width), None


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Return attention `[rows, heads, length, d]`, and the logarithm of softmax denominators `[rows, heads, length]`.

    PyTorch's CPU kernel is called directly, because the public function does not return the logarithm.
    """
    attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask, scale=scaling
    )
    return attended, sums
