"""Draws of one token per row of logits: greedy, temperature, top-k, top-p, with a counter-based random stream.

This module also finds the most likely tokens of a row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_BLOCK = 64
"""The number of IDs in a block. Probabilities are first summed by block; then an ID is searched within one block."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The parameters of a row's draw.

    `uniform` is in [0, 1); `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 are off.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    uniform: float = 0.0

    @property
    def filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


@dataclass(frozen=True, slots=True)
class ChangedRows:
    """The rows of a step whose logits change. `rows` is `[n]`, and the changed `logits` are `[n, vocab]`."""

    rows: Tensor
    logits: Tensor


def uniform(seed: int, sample_index: int, position: int) -> float:
    """Return a number in [0, 1), with 53 bits, for a position in the random stream of a seed and a sample.

    The number is a hash of the counter, not the output of a generator with state. A hash has no state to keep or to
    replay, and the streams of neighbouring seeds are unrelated.
    """
    return _number(b"tinsmith-draw", seed, sample_index, position)


def alternative_uniforms(seed: int, position: int, k: int) -> list[float]:
    """Return the random numbers for the k alternative draws at a prompt position.

    The streams for alternative draws are separate from the streams of samples.
    """
    return [_number(b"tinsmith-alt", seed, index, position) for index in range(k)]


def on_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy values to the device without waiting for the device.

    A copy from pageable host memory would wait for the device.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def draw_tokens(logits: Tensor, draws: Sequence[Draw], changed: ChangedRows | None = None) -> tuple[Tensor, Tensor]:
    """Draw a token per row of `logits` `[rows, vocab]` float32. Return the tokens and the logprobs of the tokens.

    Changed rows are drawn from their changed logits. Logprobs are at temperature 1 before any filter and any change.
    Tokens and logprobs are `[rows]` on the device; the function does not wait for the device. Logits that are not
    finite give a logprob of NaN. If several logits of a greedy row are equally large, the lowest ID is drawn. In rows
    with a temperature, a draw inverts the cumulative distribution over the IDs in ascending order.
    """
    # The vocabulary is read and written as rarely as possible. For a small model on a CPU this takes a quarter of a
    # step.
    largest = logits.amax(-1, keepdim=True)
    probabilities = torch.softmax(logits, -1)
    if changed is None:
        tokens = _chosen(logits, probabilities, largest, draws)[:, None]
    else:
        drawn_from = logits.index_copy(0, changed.rows, changed.logits)
        parts = probabilities.index_copy(0, changed.rows, torch.softmax(changed.logits, -1))
        tokens = _chosen(drawn_from, parts, drawn_from.amax(-1, keepdim=True), draws)[:, None]
    logprobs = _logprobs(logits.gather(-1, tokens), largest, probabilities)
    return tokens[:, 0], logprobs[:, 0]


def all_logprobs(logits: Tensor) -> Tensor:
    """Return the logprobs `[rows, vocab]`, with the same bits as the logprobs of `draw_tokens`."""
    return _logprobs(logits, logits.amax(-1, keepdim=True), torch.softmax(logits, -1))


def draw_alternatives(logits: Tensor, temperature: float, uniforms: list[list[float]]) -> Tensor:
    """Draw IDs `[rows, k]` from `logits` `[rows, vocab]`, one for each of `uniforms` `[rows, k]`.

    The k draws of a row are independent and from all tokens, so an ID may repeat. Temperature 0 is greedy.
    """
    flat = [number for row in uniforms for number in row]
    numbers = on_device(flat, torch.float64, logits.device).view(len(uniforms), -1)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand_as(numbers)
    temperatures = torch.full((len(logits),), temperature, dtype=torch.float64, device=logits.device)
    return _invert(_tempered(logits, logits.amax(-1, keepdim=True), temperatures), numbers)


def keep_likely(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set the probabilities of tokens outside top-k or top-p to zero.

    `probabilities` are `[rows, vocab]`; `top_k` and `top_p` are `[rows]`. Top-k is applied first (-1 is off). Top-p
    then keeps the smallest set of most likely tokens with at least the share p of the remaining probability. The most
    likely token is always kept. If two probabilities are equal, the token with the lower ID is kept first.
    """
    ordered, ids = probabilities.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), 0)
    up_to = ordered.cumsum(-1, dtype=torch.float64)
    before = up_to - ordered
    ordered = ordered.masked_fill((before >= top_p[:, None] * up_to[:, -1:]) & (top_p[:, None] < 1), 0)
    return torch.zeros_like(probabilities).scatter_(-1, ids, ordered)


def top_logprobs(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return IDs and logprobs `[rows, k]` of the most likely tokens of `logprobs` `[rows, vocab]`.

    The most likely token is first. If two tokens are equally likely, the lower ID is first. The result of a row does
    not depend on other rows. A row of NaN gives meaningless IDs.
    """
    # `torch.topk` breaks ties arbitrarily, and logits of bfloat16 tie often. A stable sort of the vocabulary takes 40
    # times as long. So equal values are searched only at the end of a row, and only in rows that have them.
    more = logprobs.topk(min(k + 1, logprobs.shape[-1]), dim=-1)
    ids = more.indices[:, :k].sort(dim=-1).values
    for row in _undecided(more.values, k):
        ids[row] = _candidates(logprobs[row], more.values[row, k - 1], k)
    values, order = logprobs.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
    return ids.gather(-1, order), values


def _logprobs(logits: Tensor, largest: Tensor, probabilities: Tensor) -> Tensor:
    """Return the logprobs of some tokens from their logits `[rows, n]`.

    `largest` and `probabilities` are computed from whole rows.
    """
    return (logits - largest) + probabilities.amax(-1, keepdim=True).log()


def _chosen(logits: Tensor, probabilities: Tensor, largest: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return the drawn IDs `[rows]`.

    `probabilities` are at temperature 1; `largest` `[rows, 1]` is the largest logit of each row.
    """
    if all(draw.temperature == 0 for draw in draws):
        return logits.argmax(-1)
    temperatures = _column(draws, "temperature", logits)
    if any(draw.temperature not in (0, 1) for draw in draws):
        probabilities = _tempered(logits, largest, temperatures)
    drawn = _draw_random(probabilities, draws)
    if all(draw.temperature > 0 for draw in draws):
        return drawn
    return torch.where(temperatures > 0, drawn, logits.argmax(-1))


def _draw_random(probabilities: Tensor, draws: Sequence[Draw]) -> Tensor:
    filtered = [row for row, draw in enumerate(draws) if draw.filters]
    if filtered:
        chosen = [draws[row] for row in filtered]
        top_k = _column(chosen, "top_k", probabilities, torch.int64)
        rows = on_device(filtered, torch.long, probabilities.device)
        kept = keep_likely(probabilities.index_select(0, rows), top_k, _column(chosen, "top_p", probabilities))
        probabilities = probabilities.index_copy(0, rows, kept)
    return _invert(probabilities, _column(draws, "uniform", probabilities)[:, None])[:, 0]


def _tempered(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Return probabilities `[rows, vocab]` at each row's temperature.

    For a row with temperature 0, the temperature 1 is used.
    """
    smallest = torch.finfo(logits.dtype).tiny
    divisor = torch.where(temperature > 0, temperature, 1.0).clamp(min=smallest).to(logits.dtype)[:, None]
    # The largest logit is subtracted first: dividing by a tiny temperature would overflow to inf - inf.
    return torch.softmax((logits - largest).div_(divisor), -1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first ID with a cumulative probability above the given part of the total.

    The result has an ID with a positive probability for each of `uniforms` `[rows, k]`. Blocks of IDs are summed first.
    Single IDs are summed only within the block that contains the result.
    """
    vocab = probabilities.shape[-1]
    blocks = _whole_blocks(probabilities).reshape(len(probabilities), -1, _BLOCK)
    sums = blocks.sum(-1, dtype=torch.float64)
    up_to = sums.cumsum(-1)
    target = _below(uniforms * up_to[:, -1:], up_to[:, -1:])
    # NaN gives an index past the end
    block = torch.searchsorted(up_to, target, right=True).clamp(max=up_to.shape[-1] - 1)
    before = up_to.gather(-1, block) - sums.gather(-1, block)
    within = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK)).cumsum(-1, dtype=torch.float64)
    # Rounding may have moved the target slightly outside of its block.
    rest = _below((target - before).clamp(min=0), within[..., -1])
    ids = block * _BLOCK + torch.searchsorted(within, rest[..., None], right=True)[..., 0]
    return ids.clamp(max=vocab - 1)


def _whole_blocks(probabilities: Tensor) -> Tensor:
    """Pad the probabilities with zeros to whole blocks."""
    missing = -probabilities.shape[-1] % _BLOCK
    return torch.nn.functional.pad(probabilities, (0, missing)) if missing else probabilities


def _below(values: Tensor, limits: Tensor) -> Tensor:
    """Return the values, with each value that reaches its limit reduced to the largest float below the limit."""
    return torch.minimum(values, torch.nextafter(limits, torch.zeros_like(limits)))


def _number(stream: bytes, seed: int, index: int, position: int) -> float:
    counter = struct.pack("<QQQ", seed & _WORD, index, position)
    digest = hashlib.blake2b(counter, digest_size=8, person=stream).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _column(draws: Sequence[Draw], name: str, like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return on_device([getattr(draw, name) for draw in draws], dtype, like.device)


def _undecided(values: Tensor, k: int) -> list[int]:
    """Return the rows in which a further token is as likely as the last of the k most likely tokens."""
    if values.shape[-1] == k:
        return []
    rows: list[int] = (values[:, k - 1] == values[:, k]).nonzero()[:, 0].tolist()
    return rows


def _candidates(logprobs: Tensor, smallest: Tensor, k: int) -> Tensor:
    """Return the k IDs of a row that are at least as likely as `smallest`, in order.

    If IDs are equally likely, the lowest IDs are kept.
    """
    ids = (logprobs >= smallest).nonzero()[:, 0]
    order = logprobs[ids].sort(stable=True, descending=True).indices[:k]
    return ids[order].sort().values
