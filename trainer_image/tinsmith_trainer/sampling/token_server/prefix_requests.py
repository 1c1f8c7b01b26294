"""Requests for scores and draws at prompt positions, which servers do not report directly.

Each request draws one token after a prefix of the prompt. No server reports the logprobs of other tokens at every
position of a prompt, or draws tokens at these positions. One server scores a prompt without the adapter's change of the
unembedding. For the first drawn position, every server reports logprobs and draws over the whole vocabulary. Servers
also cache the prefixes of a known prompt. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tinsmith_trainer.errors import UserError
from tinsmith_trainer.sampling.base import NO_TARGET, AltTokens, SampleJob, TopkLogprobs
from tinsmith_trainer.sampling.token_server.base import MOST_CANDIDATES, Generation, GenerationRequest, seed_of

MOST_PREFIX_REQUESTS = 4096
"""The limit on prefix requests in a job, which is equal to the limit on samples.

Each request contains a prefix of the prompt.
"""


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """A request with the tokens of the prompt before the position of `row`.

    The request asks for candidates, for the most likely tokens, or for the draw with the number `draw`.
    """

    purpose: Literal["named", "top_logprobs", "drawn"]
    row: int
    request: GenerationRequest
    draw: int = 0


def plan_prefixes(
    job: SampleJob, adapter: str | None, scored_from: int | None = None, *, head: bool = False
) -> tuple[PrefixRequest, ...]:
    """Plan the requests for all targets and alternatives of a job, and for the prompt's scores.

    The prompt is scored from `scored_from` on. The longest request is first. `head`: the adapter changes the
    unembedding. Raises UserError for more requests than a job may have.
    """
    named = _named(job, scored_from)
    top_logprobs = range(scored_from - 1, len(job.prompt) - 1) if scored_from and job.topk_prompt_logprobs else ()
    draws = _draws(job)
    _check_count(job, scored_from, len(named) + len(top_logprobs) + draws * (len(job.prompt) - 1))
    behind = [PrefixRequest("named", row, _request(job, adapter, row, tokens)) for row, tokens in named]
    behind += [
        PrefixRequest("top_logprobs", row, replace(_request(job, adapter, row), topk=job.topk_prompt_logprobs))
        for row in top_logprobs
    ]
    behind += [
        PrefixRequest("drawn", row, _alternative(job, adapter, row, row * draws + draw), draw)
        for row in range(len(job.prompt) - 1)
        for draw in range(draws)
    ]
    behind.sort(key=lambda one: -one.row)
    return tuple(replace(one, request=replace(one.request, head=head)) for one in behind)


def target_logprobs(
    job: SampleJob, planned: Items[PrefixRequest], drawn: Items[Generation]
) -> NDArray[np.float32] | None:
    """Return logprobs in the shape of the targets, with 0 for empty cells. Return None if the job has no targets.

    `drawn` is in the order of `planned`.
    """
    targets = job.target_prompt_logprobs
    if targets is None:
        return None
    found = np.zeros(targets.shape, np.float32)
    for row, tokens, logprobs in _logprobs_of_named(planned, drawn):
        is_listed = np.isin(targets[row], tokens)
        found[row, is_listed] = logprobs[np.searchsorted(tokens, targets[row, is_listed])]
    return found


def prompt_logprobs(job: SampleJob, planned: Items[PrefixRequest], drawn: Items[Generation]) -> NDArray[np.float32]:
    """Return the logprobs of the prompt's own tokens, with NaN for positions that were not requested.

    `drawn` is in the order of `planned`.
    """
    found = np.full(len(job.prompt), np.nan, np.float32)
    for row, tokens, logprobs in _logprobs_of_named(planned, drawn):
        own = tokens == job.prompt[row + 1]
        if own.any() and row + 1 >= _first_scored_position(job):
            found[row + 1] = logprobs[own][0]
    return found


def topk_prompt_logprobs(job: SampleJob, planned: Items[PrefixRequest], drawn: Items[Generation]) -> TopkLogprobs:
    """Return a row for each token of the prompt. A row that was not requested is empty.

    `drawn` is in the order of `planned`.
    """
    found = TopkLogprobs.empty(len(job.prompt), job.topk_prompt_logprobs)
    for one, result in zip(planned, drawn, strict=True):
        topk = result.sequence.topk_logprobs
        if one.purpose == "top_logprobs" and topk is not None:
            found.token_ids[one.row + 1], found.logprobs[one.row + 1] = topk.token_ids[0], topk.logprobs[0]
    return found


def alternative_tokens(job: SampleJob, planned: Items[PrefixRequest], drawn: Items[Generation]) -> AltTokens | None:
    """Return the alternatives, or None if no alternatives were requested. `drawn` is in the order of `planned`."""
    if not job.prompt_alt_tokens_k:
        return None
    shape = (len(job.prompt) - 1, job.prompt_alt_tokens_k)
    found = AltTokens(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    for one, result in zip(planned, drawn, strict=True):
        if one.purpose == "drawn":
            columns = slice(None) if _draws(job) == 1 else one.draw  # all greedy draws are equal
            found.tokens[one.row, columns] = result.sequence.tokens[0]
            found.logprobs[one.row, columns] = result.sequence.logprobs[0]
    return found


def _logprobs_of_named(
    planned: Items[PrefixRequest], drawn: Items[Generation]
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float32]]]:
    """Yield each row with the row's candidate tokens, in ascending order, and the candidates' logprobs."""
    for one, result in zip(planned, drawn, strict=True):
        if one.purpose == "named":
            assert result.candidates is not None
            yield one.row, np.array(one.request.candidates, np.int64), result.candidates


def _named(job: SampleJob, scored_from: int | None) -> list[tuple[int, tuple[int, ...]]]:
    """Return each row with the tokens for which the row requests logprobs.

    Each token of a row occurs once; the tokens are divided into groups that a server accepts.
    """
    found = []
    for row, row_targets in enumerate(_all_targets(job, scored_from)):
        tokens = np.unique(row_targets[row_targets != NO_TARGET]).tolist()
        found += [(row, tuple(tokens[i : i + MOST_CANDIDATES])) for i in range(0, len(tokens), MOST_CANDIDATES)]
    return found


def _all_targets(job: SampleJob, scored_from: int | None) -> NDArray[np.int64]:
    """Return the targets.

    If the logprobs of the prompt's own tokens are requested, these tokens are one more column. Raises UserError.
    """
    rows, targets = len(job.prompt) - 1, job.target_prompt_logprobs
    if targets is None:
        targets = np.full((rows, 0), NO_TARGET, np.int64)
    own = np.full((rows, 1), NO_TARGET, np.int64)
    if scored_from is not None and job.prompt_logprobs:
        own[scored_from - 1 :, 0] = job.prompt[scored_from:]
    all_targets = np.concatenate([targets, own], axis=1)
    _check_count(job, scored_from, int((all_targets != NO_TARGET).any(axis=1).sum()))
    return all_targets


def _first_scored_position(job: SampleJob) -> int:
    return 1 if job.prompt_logprobs_last_n is None else len(job.prompt) - job.prompt_logprobs_last_n


def _draws(job: SampleJob) -> int:
    """Return the number of draws at each position.

    Greedy draws are all equal, so one greedy draw per position is enough.
    """
    return min(job.prompt_alt_tokens_k, 1) if job.params.temperature == 0 else job.prompt_alt_tokens_k


def _request(job: SampleJob, adapter: str | None, row: int, candidates: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        adapter=adapter,
        prompt=job.prompt[: row + 1],
        max_tokens=1,
        temperature=0.0,
        top_k=-1,
        top_p=1.0,
        seed=None,
        stop_token_ids=(),
        stop_strings=(),
        candidates=candidates,
    )


def _alternative(job: SampleJob, adapter: str | None, row: int, index: int) -> GenerationRequest:
    seed = seed_of(job, index, "alternatives to the prompt of ")
    return replace(_request(job, adapter, row), temperature=job.params.temperature, seed=seed)


def _check_count(job: SampleJob, scored_from: int | None, count: int) -> None:
    if count <= MOST_PREFIX_REQUESTS:
        return
    options = {
        "prompt_logprobs": scored_from is not None and job.prompt_logprobs,
        "topk_prompt_logprobs": scored_from is not None and job.topk_prompt_logprobs,
        "target_prompt_logprobs": job.target_prompt_logprobs is not None,
        "prompt_alt_tokens_k": job.prompt_alt_tokens_k,
    }
    names = " and ".join(name for name, is_requested in options.items() if is_requested)
    reason = "" if scored_from is None else ", whose scores of whole prompts leave out the unembedding of an adapter"
    raise UserError(
        f"{names} would take {count} requests of one token to this sampler's server{reason}; {MOST_PREFIX_REQUESTS} "
        "are the most. Ask for fewer positions, or sample from a session or from a pool with engine: builtin."
    )
