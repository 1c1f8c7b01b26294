"""One token per row from its logits: greedy, temperature, top-k, top-p, by a counter-based random stream.

Beside it the most likely tokens of a row.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row draws. `uniform` is in [0, 1); `temperature` 0 is greedy; `top_k` -1 and `top_p` 1 are off."""

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    uniform: float = 0.0

    @property
    def filters(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1)


def uniform(seed: int, sample_index: int, position: int) -> float:
    """The number in [0, 1), 53 bits of it, that the stream (seed, sample) holds at a position.

    A hash of the counter instead of a generator's state: nothing to carry along, nothing to
    replay, and neighbouring seeds share nothing.
    """
    return _number(b"tinsmith-draw", seed, sample_index, position)


def alternative_uniforms(seed: int, position: int, k: int) -> list[float]:
    """As `uniform`, for the k draws at a prompt position: streams that no sample draws from."""
    return [_number(b"tinsmith-alt", seed, index, position) for index in range(k)]


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """A token per row of `logits` `[rows, vocab]` float32, and its logprob at temperature 1 before any filter.

    A row of logits that are not finite gives a logprob of NaN. Equal logits go to the lowest id
    under greedy. An inverse cumulative distribution over ids in order picks the others.
    """
    tokens = logits.argmax(-1)
    if any(draw.temperature > 0 for draw in draws):
        tokens = torch.where(_column(draws, "temperature", logits) > 0, _draw_random(logits, draws), tokens)
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, None])[:, 0]
    return tokens.tolist(), logprobs.tolist()


def draw_alternatives(logits: Tensor, temperature: float, uniforms: list[list[float]]) -> Tensor:
    """Ids `[rows, k]` from `logits` `[rows, vocab]`, one for each of `uniforms` `[rows, k]`; greedy at temperature 0.

    Draws are from all tokens, and independent: an id may come again.
    """
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    if temperature == 0:
        return logits.argmax(-1, keepdim=True).expand_as(numbers)
    temperatures = torch.full((len(logits),), temperature, dtype=torch.float64, device=logits.device)
    return _invert(_probabilities(logits, temperatures), numbers)


def keep_likely(probabilities: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zero where top-k or top-p leave a token out; `probabilities` `[rows, vocab]`, `top_k` and `top_p` `[rows]`.

    Top-k comes first (-1 is off); top-p then keeps the smallest set of the most likely tokens that
    has at least the share p of what top-k left. The most likely token always stays; ties go to the lower id.
    """
    ordered, ids = probabilities.sort(stable=True, dim=-1, descending=True)
    ranks = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill((top_k[:, None] > 0) & (ranks >= top_k[:, None]), 0)
    up_to = ordered.cumsum(-1, dtype=torch.float64)
    before = up_to - ordered
    ordered = ordered.masked_fill((before >= top_p[:, None] * up_to[:, -1:]) & (top_p[:, None] < 1), 0)
    return torch.zeros_like(probabilities).scatter_(-1, ids, ordered)


def top_logprobs(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and logprobs `[rows, k]` of `logprobs` `[rows, vocab]`: the most likely first, and of equals the lower id.

    Each row is treated by itself. A row of NaN gives ids without a meaning.
    """
    # `torch.topk` breaks ties as it likes, and logits of bfloat16 tie often. A sort of the vocabulary that does not
    # takes 40 times as long; so only equals at the end of a row are looked for, and only in rows that have some.
    more = logprobs.topk(min(k + 1, logprobs.shape[-1]), dim=-1)
    ids = more.indices[:, :k].sort(dim=-1).values
    for row in _undecided(more.values, k):
        ids[row] = _candidates(logprobs[row], more.values[row, k - 1], k)
    values, order = logprobs.gather(-1, ids).sort(stable=True, dim=-1, descending=True)
    return ids.gather(-1, order), values


def _draw_random(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    probabilities = _probabilities(logits, _column(draws, "temperature", logits))
    filtered = [row for row, draw in enumerate(draws) if draw.filters]
    if filtered:
        chosen = [draws[row] for row in filtered]
        top_k = _column(chosen, "top_k", logits, torch.int64)
        probabilities[filtered] = keep_likely(probabilities[filtered], top_k, _column(chosen, "top_p", logits))
    return _invert(probabilities, _column(draws, "uniform", logits)[:, None])[:, 0]


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """`[rows, vocab]` at each row's temperature; of a row at 0, at 1."""
    smallest = torch.finfo(logits.dtype).tiny
    divisor = torch.where(temperature > 0, temperature, 1.0).clamp(min=smallest).to(logits.dtype)[:, None]
    # The largest logit is taken off first: dividing by a tiny temperature would overflow to inf - inf.
    return torch.softmax((logits - logits.amax(-1, keepdim=True)) / divisor, -1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """The first id, for each of `uniforms` `[rows, k]`, whose cumulative probability exceeds that part of the total.

    It has a positive probability.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target, right=True)
    return ids.clamp(max=probabilities.shape[-1] - 1)  # only rows of NaN point past the end


def _number(stream: bytes, seed: int, index: int, position: int) -> float:
    counter = struct.pack("<QQQ", seed & _WORD, index, position)
    digest = hashlib.blake2b(counter, digest_size=8, person=stream).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _column(draws: Sequence[Draw], name: str, like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([getattr(draw, name) for draw in draws], dtype=dtype, device=like.device)


def _undecided(values: Tensor, k: int) -> list[int]:
    """Rows whose last of the most likely has an equal behind it."""
    if values.shape[-1] == k:
        return []
    rows: list[int] = (values[:, k - 1] == values[:, k]).nonzero()[:, 0].tolist()
    return rows


def _candidates(logprobs: Tensor, smallest: Tensor, k: int) -> Tensor:
    """The k ids of a row that are at least as likely as `smallest`, the lowest of equals; in their order."""
    ids = (logprobs >= smallest).nonzero()[:, 0]
    order = logprobs[ids].sort(stable=True, descending=True).indices[:k]
    return ids[order].sort().values
