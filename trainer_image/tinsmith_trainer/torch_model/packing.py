"""Packed forwards: sequences follow each other without padding, and each sequence attends only to itself.

The attention of a packed forward handles each sequence separately. All other layers of the model must work token by
token, with explicit positions. `packs` tests this for each model.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor, nn

from tinsmith_trainer.torch_model.attention import BLOCK_QUERIES, blocked_attention, use_attention
from tinsmith_trainer.torch_model.experts import expert_projections
from tinsmith_trainer.torch_model.lora import DeltasApart, StackedLoraLinear, routed

log = structlog.get_logger(__name__)

LONG_ROPE = "longrope"
BY_LENGTH = ("dynamic", LONG_ROPE)
"""The types of rotary embeddings whose angles depend on the longest row of a forward, including its padding."""

PROBE_LENGTHS = [5, 11, 11, BLOCK_QUERIES + 3]
PROBE_PRODUCT_TOKENS = 16
PROBE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The largest difference, as a part of the largest element. A sequence that reads another one differs by about 1."""
FILLED_TO_TOKENS = 16
"""The number to a multiple of which a forward is padded. All elements, and half of them, are then whole vectors."""
CACHE_LINE_FLOATS = 16


@dataclass(frozen=True, slots=True)
class Packing:
    """Consecutive sequences with these `lengths`, and padding tokens at the end, to a multiple of `filled_to`."""

    lengths: Sequence[int]
    filled_to: int = FILLED_TO_TOKENS

    @property
    def filling(self) -> int:
        return -sum(self.lengths) % self.filled_to

    @property
    def tokens(self) -> int:
        return sum(self.lengths) + self.filling

    def filled(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate parts `[some tokens, ...]`, and add zeros at the end, to `[1, tokens, ...]`."""
        return torch.cat([*parts, parts[0].new_zeros((self.filling, *parts[0].shape[1:]))]).unsqueeze(0)

    def attended(self) -> AbstractContextManager[None]:
        """Let each sequence attend only to itself in this thread's forwards."""
        return use_attention(functools.partial(_attend_apart, self))

    def ends(self, device: torch.device) -> Tensor:
        """Return the first token of each sequence and the end of the last one, int32 `[sequences + 1]`."""
        return _ends_of(tuple(self.lengths), device)


@functools.lru_cache(maxsize=4)
def _ends_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the ends of sequences. The layers of a forward share them, because a copy to a GPU waits for the GPU."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)


def packed_hidden_states(decoder: nn.Module, tokens: Tensor, packing: Packing) -> Tensor:
    """Return the last hidden states `[tokens, d]`, including padding. The int64 `tokens` have no padding."""
    # Models pass a mask of four dimensions to their attention unchanged, which saves building one.
    no_mask = torch.empty((1, 1, 1, 0), device=tokens.device)
    positions = torch.from_numpy(np.concatenate([np.arange(length) for length in packing.lengths])).to(tokens.device)
    with packing.attended():
        hidden: Tensor = decoder(
            input_ids=packing.filled([tokens]),
            position_ids=packing.filled([positions]),
            attention_mask=no_mask,
            use_cache=False,
        ).last_hidden_state
    return hidden.flatten(0, 1)


def _attend_apart(
    packing: Packing,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each sequence separately."""
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal) or options.get("dropout"):
        raise ValueError("packed sequences attend causally and without dropout")
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    if query.device.type != "cpu":
        ends, longest = packing.ends(query.device), max(packing.lengths)
        return varlen_attention(queries, keys, values, ends, longest, scale).unsqueeze(0), None
    return blocked_attention(queries, keys, values, packing.lengths, scale).unsqueeze(0), None


def varlen_attention(queries: Tensor, keys: Tensor, values: Tensor, ends: Tensor, longest: int, scale: float) -> Tensor:
    """Return `[tokens, heads, d]` by PyTorch's kernel for sequences of several lengths, which takes 16 bits only.

    `ends` are the first token of each sequence and the end of the last one, int32 `[sequences + 1]`.
    """
    from torch.nn.attention.varlen import varlen_attn  # PyTorch has it since 2.10

    # PyTorch 2.11 has no such argument, and takes fewer key heads without it.
    asks = "enable_gqa" in inspect.signature(varlen_attn).parameters
    shared: dict[str, Any] = {"enable_gqa": True} if asks and queries.shape[1] != keys.shape[1] else {}
    attended = varlen_attn(
        *(queries, keys, values, ends, ends, longest, longest), scale=scale, window_size=(-1, 0), **shared
    )
    assert isinstance(attended, Tensor)  # without auxiliary results
    return attended


@dataclass(frozen=True, slots=True)
class ChangingAngles:
    """A rope type whose angles change with the length.

    `behind` is the length of the longest sequence with fixed angles, if it is known.
    """

    rope_type: str
    behind: int | None


def changing_angles(config: Any) -> ChangingAngles | None:
    """Return how the angles of a model change with a sequence's length, or None if they do not change.

    `config` is a transformers configuration. Layers of several kinds may have their own parameters.
    """
    text = config.get_text_config()
    for parameters in _rope_parameters(getattr(text, "rope_parameters", None)):
        if (rope := parameters.get("rope_type")) in BY_LENGTH:
            is_long = rope == LONG_ROPE
            behind = parameters.get("original_max_position_embeddings") if is_long else text.max_position_embeddings
            return ChangingAngles(rope, behind)
    return None


def _rope_parameters(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict):
        yield found
        for own in found.values():
            yield from _rope_parameters(own)


def packs(decoder: nn.Module, config: Any, longest: int) -> bool:
    """Return whether packed sequences shorter than `longest` have exactly the bits of separate sequences.

    Products need rows that begin at cache lines. Otherwise, BLAS may sum a row differently at another position.
    """
    widths = [size for layer in decoder.modules() if isinstance(layer, nn.Linear) for size in layer.weight.shape]
    widths += [
        size for layer in expert_projections(decoder).values() for size in (layer.in_features, layer.out_features)
    ]
    if any(width % CACHE_LINE_FLOATS for width in widths):
        return False
    return _attends_apart(config, longest) and _agrees(_has_equal_bits, decoder, config)


def packs_within_rounding(decoder: nn.Module, config: Any, longest: int) -> bool:
    """Return whether packed sequences shorter than `longest` are separate sequences, except for rounding."""
    return _attends_apart(config, longest) and _agrees(_is_close, decoder, config)


def _attends_apart(config: Any, longest: int) -> bool:
    """Return whether the attention of a sequence depends only on its own tokens and positions.

    A window of attention must be as long as the sequences, and the angles must not depend on the longest sequence.
    """
    text = config.get_text_config()
    windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    is_short = any(window is not None and window < longest for window in windows)
    return not is_short and changing_angles(config) is None


def _agrees(compare: Callable[[nn.Module, Tensor], bool], decoder: nn.Module, config: Any) -> bool:
    device = next(decoder.parameters()).device
    tokens = torch.arange(sum(PROBE_LENGTHS), device=device) % config.get_text_config().vocab_size
    try:
        with torch.no_grad():
            return compare(decoder, tokens)
    except Exception as error:  # a model may raise any error for unexpected positions and masks
        log.info("sequences are not packed", model=type(decoder).__name__, error=str(error))
        return False


def _has_equal_bits(decoder: nn.Module, tokens: Tensor) -> bool:
    together = torch.split(_probe(decoder, tokens, PROBE_LENGTHS), PROBE_LENGTHS)
    for own, packed in zip(torch.split(tokens, PROBE_LENGTHS), together, strict=True):
        is_right = _alike(packed, _plain(decoder, own))
        if not is_right or not torch.equal(packed, _probe(decoder, own, [len(own)])):
            return False
    return True


def _is_close(decoder: nn.Module, tokens: Tensor) -> bool:
    packed = packed_hidden_states(decoder, tokens, Packing(PROBE_LENGTHS, filled_to=1))
    plain = torch.cat([_plain(decoder, own) for own in torch.split(tokens, PROBE_LENGTHS)])
    if is_right := _alike(packed, plain):
        return True
    log.warning("sequences are not packed", model=type(decoder).__name__, error="the trial differs from rows")
    return is_right


def _plain(decoder: nn.Module, tokens: Tensor) -> Tensor:
    hidden: Tensor = decoder(input_ids=tokens.unsqueeze(0), use_cache=False).last_hidden_state[0]
    return hidden


def _alike(packed: Tensor, plain: Tensor) -> bool:
    tolerance = PROBE_TOLERANCE[plain.dtype] * float(plain.abs().max())
    return torch.allclose(packed, plain, rtol=0, atol=tolerance)


def _probe(decoder: nn.Module, tokens: Tensor, lengths: Sequence[int]) -> Tensor:
    packing = Packing(lengths)
    no_delta = DeltasApart((None,), (packing.tokens,), PROBE_PRODUCT_TOKENS)
    layers = (module for module in decoder.modules() if isinstance(module, StackedLoraLinear))
    with routed({layer.key: no_delta for layer in layers}):
        return packed_hidden_states(decoder, tokens, packing)[: len(tokens)]
