"""The likeliest tokens of positions, as servers name them: more than were asked for, and in any order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items

import numpy as np

from tinsmith_trainer.sampling.base import TopkLogprobs

Row = Mapping[int, float | None]
"""Logprobs by tokens. None, and what is not a number, stand for a logprob that the server could not compute."""


def likeliest(rows: Items[Row | None], k: int) -> TopkLogprobs:
    """A row of K for each: the likeliest first, of equals the lower id, and empty cells where a row has less.

    Servers add the token that is in the prompt or was drawn, which may be none of the likeliest.
    """
    found = TopkLogprobs.empty(len(rows), k)
    for position, row in enumerate(rows):
        known = [
            (-logprob, token)
            for token, logprob in (row or {}).items()
            if logprob is not None and not math.isnan(logprob)
        ]
        for column, (negative, token) in enumerate(sorted(known)[:k]):
            found.token_ids[position, column] = token
            found.logprobs[position, column] = -negative
    return found


def joined(first: TopkLogprobs, rest: TopkLogprobs) -> TopkLogprobs:
    """Rows of one behind those of the other."""
    return TopkLogprobs(
        np.concatenate([first.token_ids, rest.token_ids]), np.concatenate([first.logprobs, rest.logprobs])
    )
