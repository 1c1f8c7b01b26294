"""The requested scores of a prompt's positions, filled in while the prompt is computed."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_trainer.sampling.base import NO_TARGET, AltTokens, SampleJob, TopkLogprobs
from tinsmith_trainer.sampling.builtin.draws import alternative_uniforms, draw_alternatives, top_logprobs


def first_scored(job: SampleJob) -> int | None:
    """Return the first prompt position with a requested score, or None.

    The logits before this position and all later logits must be computed, even if the prompt's keys and values are
    cached.
    """
    length = len(job.prompt)
    first = min(_first_of_suffix(job), _first_target(job), 1 if job.prompt_alt_tokens_k else length)
    return first if first < length else None


class PromptScores:
    """The scores of a prompt. Each score that was not requested is None."""

    def __init__(self, job: SampleJob, seed: int) -> None:
        self._job = job
        self._seed = seed
        length, k = len(job.prompt), job.prompt_alt_tokens_k
        self.logprobs = np.full(length, np.nan, np.float32) if job.prompt_logprobs else None
        self.topk = TopkLogprobs.empty(length, job.topk_prompt_logprobs) if job.topk_prompt_logprobs else None
        targets = job.target_prompt_logprobs
        self.targets = None if targets is None else np.zeros(targets.shape, np.float32)
        drawn = (length - 1, k)
        self.alternatives = AltTokens(np.zeros(drawn, np.int32), np.zeros(drawn, np.float32)) if k else None
        self._first_of_suffix = _first_of_suffix(job)

    def take(self, position: int, logits: Tensor) -> bool:
        """Read the scores of the prompt's tokens from a position on, from `logits` `[n, vocab]`.

        Return False if the logits are not finite.
        """
        logprobs = torch.log_softmax(logits, -1)
        if torch.isnan(logprobs[:, 0]).any():  # in this case the whole row is NaN
            return False
        self._take_suffix(position, logprobs)
        self._take_targets(position, logprobs)
        self._take_alternatives(position, logits, logprobs)
        return True

    def _take_suffix(self, position: int, logprobs: Tensor) -> None:
        skipped, end = max(0, self._first_of_suffix - position), position + len(logprobs)
        start, rows = position + skipped, logprobs[skipped:]
        if start >= end:
            return
        if self.logprobs is not None:
            self.logprobs[start:end] = _gather(rows, self._job.prompt[start:end, None].astype(np.int64))[:, 0]
        if self.topk is not None:
            ids, values = top_logprobs(rows, self._job.topk_prompt_logprobs)
            self.topk.token_ids[start:end] = ids.cpu().numpy()
            self.topk.logprobs[start:end] = values.cpu().numpy()

    def _take_targets(self, position: int, logprobs: Tensor) -> None:
        """Fill in the logprobs of the prompt's target tokens. Row i is for position i + 1."""
        targets = self._job.target_prompt_logprobs
        if targets is None or self.targets is None:
            return
        part = targets[position - 1 : position - 1 + len(logprobs)]
        values = np.where(part == NO_TARGET, np.float32(0), _gather(logprobs, np.maximum(part, 0)))
        self.targets[position - 1 : position - 1 + len(logprobs)] = values

    def _take_alternatives(self, position: int, logits: Tensor, logprobs: Tensor) -> None:
        if self.alternatives is None:
            return
        part = slice(position - 1, position - 1 + len(logits))
        numbers = [
            alternative_uniforms(self._seed, at, self._job.prompt_alt_tokens_k)
            for at in range(position, position + len(logits))
        ]
        ids = draw_alternatives(logits, self._job.params.temperature, numbers).cpu().numpy()
        self.alternatives.tokens[part] = ids
        self.alternatives.logprobs[part] = _gather(logprobs, ids)


def _first_of_suffix(job: SampleJob) -> int:
    length, last_n = len(job.prompt), job.prompt_logprobs_last_n
    if not (job.prompt_logprobs or job.topk_prompt_logprobs):
        return length
    return 1 if last_n is None else max(1, length - last_n)


def _first_target(job: SampleJob) -> int:
    """Return the position of the first row that has a token; such a row must exist. Row i is for position i + 1."""
    if job.target_prompt_logprobs is None:
        return len(job.prompt)
    return 1 + int(np.argmax((job.target_prompt_logprobs != NO_TARGET).any(axis=1)))


def _gather(logprobs: Tensor, ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the logprobs of `ids` `[rows, k]`."""
    gathered: NDArray[np.float32] = logprobs.gather(-1, torch.from_numpy(ids).to(logprobs.device)).cpu().numpy()
    return gathered
