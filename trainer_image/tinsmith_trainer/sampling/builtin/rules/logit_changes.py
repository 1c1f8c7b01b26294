"""Changes of the logits before a draw: biases, penalties, and the mask of a grammar.

The changes concern single rows. The other rows of a step keep their bits, so a constrained sequence never changes
other samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import SampleJob
from tinsmith_trainer.sampling.builtin.draws import ChangedRows, on_device

WORD_BITS = 32


class LogitChanges:
    """The changes of one sequence's logits.

    `error` is set if the sequence cannot continue, because its grammar is too complex.
    """

    def __init__(self, job: SampleJob) -> None:
        params = job.params
        self._params = params
        self._bias = dict(params.logit_bias)
        self._counts: Counter[int] = Counter()
        self._state = None if job.grammar is None else job.grammar.begin()
        self.needs_last_token = params.has_penalties or self._state is not None
        self.error: UserError | None = None

    def added(self) -> dict[int, float]:
        """Return the numbers that are added to the logits of single tokens."""
        found = dict(self._bias)
        if self._params.has_penalties:
            for token, count in self._counts.items():
                penalty = self._params.frequency_penalty * count + self._params.presence_penalty
                found[token] = found.get(token, 0.0) - penalty
        return found

    def allowed(self) -> NDArray[np.int32] | None:
        """Return the allowed tokens, one bit for each token, or None if all tokens are allowed."""
        if self._state is None or self.error is not None:
            return None
        try:
            return self._state.allowed()
        except UserError as error:
            self.error = error
            return None

    def take(self, token: int) -> bool:
        """Take a drawn token. Return whether the grammar ends the sequence."""
        self._counts[token] += 1
        if self._state is None or self.error is not None:
            return False
        try:
            return self._state.take(token)
        except UserError as error:
            self.error = error
            return False


def changed_rows(logits: Tensor, changes: Sequence[LogitChanges | None]) -> ChangedRows | None:
    """Return the changed logits of the rows with changes, or None if no row changes. `logits` are `[rows, vocab]`."""
    chosen = [(row, change) for row, change in enumerate(changes) if change is not None]
    if not chosen:
        return None
    rows = on_device([row for row, _ in chosen], torch.long, logits.device)
    changed = logits.index_select(0, rows)
    _add(changed, [change.added() for _, change in chosen])
    _mask(changed, [change.allowed() for _, change in chosen])
    return ChangedRows(rows, changed)


def _add(logits: Tensor, added: Sequence[dict[int, float]]) -> None:
    cells = [(row, token, amount) for row, amounts in enumerate(added) for token, amount in amounts.items()]
    if not cells:
        return
    rows, tokens, amounts = zip(*cells, strict=True)
    device = logits.device
    places = (on_device(rows, torch.long, device), on_device(tokens, torch.long, device))
    logits.index_put_(places, on_device(amounts, logits.dtype, device), accumulate=True)


def _mask(logits: Tensor, allowed: Sequence[NDArray[np.int32] | None]) -> None:
    masked = [(row, words) for row, words in enumerate(allowed) if words is not None]
    if not masked:
        return
    rows = on_device([row for row, _ in masked], torch.long, logits.device)
    words = torch.from_numpy(np.stack([words for _, words in masked])).to(logits.device)
    bits = (words[:, :, None] >> torch.arange(WORD_BITS, device=logits.device, dtype=torch.int32)) & 1
    known = bits.flatten(1).bool()[:, : logits.shape[-1]]
    # The model may have more logits than the tokenizer has tokens.
    known = torch.nn.functional.pad(known, (0, logits.shape[-1] - known.shape[-1]))
    logits[rows] = logits[rows].masked_fill(~known, float("-inf"))
