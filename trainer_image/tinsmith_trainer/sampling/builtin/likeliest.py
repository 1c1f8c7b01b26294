"""The likeliest tokens of positions, from the logprobs of all tokens."""

from __future__ import annotations

from torch import Tensor


def likeliest(logprobs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids and logprobs `[rows, k]` of `logprobs` `[rows, vocab]`: the likeliest first, and of equals the lower id.

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


def _undecided(values: Tensor, k: int) -> list[int]:
    """Rows whose last of the likeliest has an equal behind it."""
    if values.shape[-1] == k:
        return []
    rows: list[int] = (values[:, k - 1] == values[:, k]).nonzero()[:, 0].tolist()
    return rows


def _candidates(logprobs: Tensor, smallest: Tensor, k: int) -> Tensor:
    """The k ids of a row that are at least as likely as `smallest`, the lowest of equals; in their order."""
    ids = (logprobs >= smallest).nonzero()[:, 0]
    order = logprobs[ids].sort(stable=True, descending=True).indices[:k]
    return ids[order].sort().values
